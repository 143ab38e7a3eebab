"""Statistics of a queue and its workers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import chain

from pydantic import BaseModel

from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call, Operation
from promptq.shared.queue.maxmemory_policy import maxmemory_warning
from promptq.shared.runtime.printable import printable


class AffinityStats(BaseModel):
    """Sums of the fields `affinity_*` of a queue's live workers, without overflow workers."""

    held: int
    missed: int
    left: int
    cached_tokens: int | None
    """None if no worker's engine reports its cache."""

    def __str__(self) -> str:
        """Returns a line for people."""
        text = f"{self.held:,} hits, {self.missed:,} misses"
        text += f"; {self.left:,} requests waited for another worker"
        if self.cached_tokens is None:
            return text
        return f"{text}; {self.cached_tokens:,} prompt tokens from the cache"


class QueueStats(BaseModel):
    """The number of requests in each state, and the heartbeats of live workers."""

    queue: str
    model: str = ""
    paused: bool = False
    waiting: int
    delayed: int
    active: int
    """Number of requests that workers hold, either running or prepared to run."""
    dead: int
    """Number of dead letters: requests that no worker tries again, because they crash workers."""
    workers: list[WorkerStats]
    overflow_workers: list[WorkerStats] = []
    """Workers that help out: they claim only requests that `workers` would finish too late."""
    affinity: AffinityStats | None = None
    """Counts of the effects of `affinity_ms`; None while the setting is off."""
    has_standby: bool = False
    """Whether a worker that loads several models in turns also serves this queue."""
    why_no_worker: str = ""
    """Why the queue has no worker, with advice; empty if the queue has a worker."""
    now_ms: int = 0
    """The server's time in Unix milliseconds. Heartbeats use the same clock."""
    server_warning: str = ""
    """A warning if the server may delete requests; otherwise empty."""

    def why_waiting(self) -> str:
        """Returns why no worker claims waiting requests, with advice, or '' if a worker claims
        them."""
        if self.paused:
            return f"the queue is paused; `promptq resume{queue_option(self.queue)}` ends the pause"
        states = sorted({worker.state for worker in self.workers})
        if states and "running" not in states:
            return f"no worker claims requests; their states: {', '.join(map(printable, states))}"
        return self.why_no_worker


def queue_option(queue: str) -> str:
    """Returns the option ` --queue NAME` for a command line; empty for the queue `default`."""
    return "" if queue == "default" else f" --queue {shlex.quote(printable(queue))}"


def stats(keys: Keys, /) -> Operation[QueueStats]:
    """Reads statistics of the queue and its workers."""
    (model, standby_until), (earlier_model, paused, affinity_ms), *numbers, server_warning = yield [
        Call("", ["HMGET", keys.model, "model", "standby_until"], list, lambda: [None] * 2),
        Call(
            "", ["HMGET", keys.config, "model", "paused", "affinity_ms"], list, lambda: [None] * 3
        ),
        lookups.count(keys),
        *(Call("", ["ZCARD", key], int, int) for key in (keys.delayed, keys.leases, keys.dead)),
        lookups.server_time_ms(),
        maxmemory_warning(),
    ]
    waiting, delayed, active, dead, now_ms = numbers
    kinds = yield [lookups.live_worker_ids(keys, now_ms, overflow=each) for each in (False, True)]
    reports = yield [lookups.worker_stats(keys, worker_id) for worker_id in chain(*kinds)]
    # None: the worker left between the two calls.
    workers = [report for report in reports if report is not None]
    has_standby = lookups.is_later(standby_until, now_ms)
    claiming = [worker for worker in workers if not worker.overflow]
    return QueueStats(
        queue=keys.queue,
        # Workers of earlier releases write the model into `config`.
        model=(model or earlier_model or b"").decode(errors="replace"),
        paused=paused == b"1",
        waiting=waiting,
        delayed=delayed,
        active=active,
        dead=dead,
        workers=claiming,
        overflow_workers=[worker for worker in workers if worker.overflow],
        affinity=_affinity_of(claiming) if lookups.is_later(affinity_ms, 0) else None,
        has_standby=has_standby,
        why_no_worker="" if claiming else _why_no_worker(keys.queue, has_standby),
        now_ms=now_ms,
        server_warning=server_warning,
    )


def _affinity_of(workers: Sequence[WorkerStats]) -> AffinityStats:
    reported = [one.reported("affinity_cached_tokens") for one in workers]
    known = [num for num in reported if num is not None]
    return AffinityStats(
        held=sum(one.affinity_held for one in workers),
        missed=sum(one.affinity_missed for one in workers),
        left=sum(one.affinity_left for one in workers),
        cached_tokens=sum(known) if known or not workers else None,
    )


def _why_no_worker(queue: str, has_standby: bool) -> str:
    if has_standby:
        return "the model is not loaded: a worker loads it when its turn comes"
    start = f"start one with `promptq worker{queue_option(queue)}`"
    return f"no worker is alive (one that was just started loads its model first); {start}"
