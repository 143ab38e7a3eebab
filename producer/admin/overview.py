"""Views of a queue and its workers for people: an overview, and the batch of one worker."""

from __future__ import annotations

from pydantic import BaseModel

from promptq.producer.admin.autoscaling import Scaling, scaling_of
from promptq.producer.admin.queue_stats import QueueStats, stats
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import Sample, SlotStats, WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue import statistics as queue_statistics
from promptq.shared.queue.call import Operation
from promptq.shared.queue.statistics import measure_work


class Overview(QueueStats):
    """State of a queue and its workers, with the latest statistics."""

    priorities: dict[int, int]
    """Number of waiting requests by priority, lowest number first; estimates if many wait."""
    running: int
    """Number of requests in the workers' batches."""
    tokens_per_second: float
    """Tokens per second of all workers together, from their last heartbeats."""
    scaling: Scaling
    """The number of workers that the queue should have."""
    latest: Sample | None
    """The last sample of the queue's statistics; None if there was no sample in the last hour."""


class WorkerView(BaseModel):
    """A worker and its sequences: the running ones by slot, then those that wait in its engine."""

    stats: WorkerStats
    told_at: int
    """Unix milliseconds (server) of the worker's last report about its batch; 0: none yet."""
    slots: list[SlotStats]


def overview(keys: Keys, /) -> Operation[Overview]:
    """Reads the state of the queue and its workers, with the latest statistics."""
    now = yield from stats(keys)
    priorities, latest, work = yield [
        queue_statistics.priorities(keys),
        queue_statistics.samples(keys, 0, limit=1),
        measure_work(keys),
    ]
    return Overview(
        **dict(now),
        priorities=priorities,
        running=sum(worker.num_running for worker in now.workers),
        tokens_per_second=sum(worker.recent_tokens_per_second for worker in now.workers),
        scaling=scaling_of(keys.queue, work),
        latest=latest[0] if latest else None,
    )


def worker(keys: Keys, /, worker_id: str) -> Operation[WorkerView]:
    """Reads a worker and its current batch. Raises RequestNotFoundError if the worker is gone."""
    for _ in range(3):  # a heartbeat may come between the two calls
        stats, (told_at, slots) = yield [
            lookups.worker_stats(keys, worker_id),
            queue_statistics.slots(keys, worker_id),
        ]
        if stats is None:
            raise RequestNotFoundError(f"no worker {worker_id!r} is alive")
        if told_at == stats.heartbeat_at:
            break
    return WorkerView(stats=stats, told_at=told_at, slots=slots)
