"""A queue and its workers as people look at them: an overview, and one worker's batch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pydantic import BaseModel

from promptq.producer.admin.queue_stats import QueueStats, read_stats
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import Sample, SlotStats, WorkerStats
from promptq.shared.queue import lookups, statistics
from promptq.shared.queue.call import Call

_READS = 3


class Overview(QueueStats):
    """What the queue holds, how its workers fare, and what it was like lately."""

    priorities: dict[int, int]
    """How many wait at each priority, lowest number first; an estimate where many wait."""
    running: int
    """In the workers' batches."""
    tokens_per_second: float
    """Of all workers, since their last heartbeats."""
    latest: Sample | None
    """The last sample of the statistics; None where there was none for an hour."""


class WorkerView(BaseModel):
    """A worker and its batch: those that run by slot, then those that wait inside its engine."""

    stats: WorkerStats
    told_at: int
    """When it told of its batch, in Unix milliseconds of the server; 0: not yet."""
    slots: list[SlotStats]


def read_overview(keys: Keys) -> Generator[Call[Any], Any, Overview]:
    """Yields calls, is sent what they give."""
    stats = yield from read_stats(keys)
    priorities = yield statistics.priorities(keys)
    latest = yield statistics.samples(keys, 0, limit=1)
    return Overview(
        **dict(stats),
        priorities=priorities,
        running=sum(worker.num_running for worker in stats.workers),
        tokens_per_second=sum(worker.recent_tokens_per_second for worker in stats.workers),
        latest=latest[0] if latest else None,
    )


def read_worker(keys: Keys, worker_id: str) -> Generator[Call[Any], Any, WorkerView]:
    """Yields calls, is sent what they give. Raises RequestNotFoundError for one that is gone."""
    for _ in range(_READS):  # a heartbeat may come between the two calls
        stats = yield lookups.worker_stats(keys, worker_id)
        if stats is None:
            raise RequestNotFoundError(f"no worker {worker_id!r} is alive")
        told_at, slots = yield statistics.slots(keys, worker_id)
        if told_at == stats.heartbeat_at:
            break
    return WorkerView(stats=stats, told_at=told_at, slots=slots)


def read_statistics(keys: Keys, since_ms: int = 0) -> Generator[Call[Any], Any, list[Sample]]:
    """Samples of the last hour from `since_ms` on, the oldest first. Yields calls likewise."""
    found: list[Sample] = yield statistics.samples(keys, since_ms)
    return found


def keep_statistics(keys: Keys) -> Generator[Call[Any], Any, None]:
    """Write the sample that is over, should no worker be there to do it. Yields calls likewise."""
    yield statistics.sample(statistics.Contribution())
