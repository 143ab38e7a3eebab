"""A queue and its workers as people look at them: an overview, and one worker's batch."""

from __future__ import annotations

from pydantic import BaseModel

from promptq.producer.admin.queue_stats import QueueStats, stats
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import Sample, SlotStats, WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue import statistics as queue_statistics
from promptq.shared.queue.call import Operation

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


def overview(keys: Keys, /) -> Operation[Overview]:
    """What the queue holds, how its workers fare, and what it was like lately."""
    now = yield from stats(keys)
    priorities, latest = yield [
        queue_statistics.priorities(keys),
        queue_statistics.samples(keys, 0, limit=1),
    ]
    return Overview(
        **dict(now),
        priorities=priorities,
        running=sum(worker.num_running for worker in now.workers),
        tokens_per_second=sum(worker.recent_tokens_per_second for worker in now.workers),
        latest=latest[0] if latest else None,
    )


def worker(keys: Keys, /, worker_id: str) -> Operation[WorkerView]:
    """A worker and its batch as it is now. Raises RequestNotFoundError for one that is gone."""
    for _ in range(_READS):  # a heartbeat may come between the two calls
        told, (told_at, slots) = yield [
            lookups.worker_stats(keys, worker_id),
            queue_statistics.slots(keys, worker_id),
        ]
        if told is None:
            raise RequestNotFoundError(f"no worker {worker_id!r} is alive")
        if told_at == told.heartbeat_at:
            break
    return WorkerView(stats=told, told_at=told_at, slots=slots)


def statistics(keys: Keys, /, since_ms: int = 0) -> Operation[list[Sample]]:
    """Samples of what the queue was like, one for each 5 s of the last hour, from `since_ms` (Unix
    milliseconds of the server) on, the oldest first.
    """
    found: list[Sample] = yield queue_statistics.samples(keys, since_ms)
    return found


def keep_statistics(keys: Keys, /) -> Operation[None]:
    """Call it every few seconds to have samples of the time when no worker is alive, too."""
    yield queue_statistics.sample(queue_statistics.Contribution())
