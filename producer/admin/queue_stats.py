"""What a queue holds and how its workers fare."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pydantic import BaseModel

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call


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


def read_stats(keys: Keys) -> Generator[Call[Any], Any, QueueStats]:
    """Yields calls, is sent what they give."""
    (model,) = yield Call("", ["HMGET", keys.model, "model"], list)
    told_before, paused = yield Call("", ["HMGET", keys.config, "model", "paused"], list)
    counts = {}
    counts["pending"] = yield lookups.count(keys)
    for name in ("delayed", "leases", "dead"):
        counts[name] = yield Call("", ["ZCARD", getattr(keys, name)], int)
    now_ms = yield lookups.server_time_ms()
    workers = []
    for worker_id in (yield lookups.live_worker_ids(keys, now_ms)):
        worker = yield lookups.worker_stats(keys, worker_id)
        if worker is not None:  # it left between the two calls
            workers.append(worker)
    return QueueStats(
        queue=keys.queue,
        model=(model or told_before or b"").decode(),  # earlier releases told in `config`
        paused=paused == b"1",
        waiting=counts["pending"],
        delayed=counts["delayed"],
        active=counts["leases"],
        dead=counts["dead"],
        workers=workers,
        now_ms=now_ms,
    )
