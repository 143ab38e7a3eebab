"""What a queue holds and how its workers fare."""

from __future__ import annotations

from pydantic import BaseModel

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, Operation


class QueueStats(BaseModel):
    """Counts of requests by where they are, and the heartbeats of the workers that live."""

    queue: str
    model: str = ""
    paused: bool = False
    waiting: int
    delayed: int
    active: int
    """Held by a worker: running, or prepared to run."""
    dead: int
    """Dead letters: given up after crashes of their workers."""
    workers: list[WorkerStats]
    now_ms: int = 0
    """Server time, by which heartbeats are dated."""


def stats(keys: Keys, /) -> Operation[QueueStats]:
    """What the queue holds and how its workers fare."""
    (model,), (told_before, paused), waiting, delayed, active, dead, now_ms = yield [
        Call("", ["HMGET", keys.model, "model"], list),
        Call("", ["HMGET", keys.config, "model", "paused"], list),
        lookups.count(keys),
        *(Call("", ["ZCARD", key], int) for key in (keys.delayed, keys.leases, keys.dead)),
        lookups.server_time_ms(),
    ]
    worker_ids = yield lookups.live_worker_ids(keys, now_ms)
    workers = yield [lookups.worker_stats(keys, worker_id) for worker_id in worker_ids]
    return QueueStats(
        queue=keys.queue,
        model=(model or told_before or b"").decode(),  # earlier releases told in `config`
        paused=paused == b"1",
        waiting=waiting,
        delayed=delayed,
        active=active,
        dead=dead,
        workers=[it for it in workers if it is not None],  # it left between the two calls
        now_ms=now_ms,
    )
