"""Brings back what crashed workers held, but blames nobody for an outage; lets go of orphans."""

from __future__ import annotations

import time
from collections.abc import Callable

from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger


class Reaper:
    """`run_once` is called several times a lease.

    While the server was away nobody could renew, so leases that ran out prove no crash. A worker
    that could not reach it for half a lease therefore gives the others half a lease to renew before
    it reaps again. The same goes for one that was itself frozen, and for one that has just started,
    which cannot know how long the server has been there.

    Each turn also looks for orphans on one page of the server's keys, unless the server's access
    rules do not let workers see what keys there are.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._patience = queue.lease_ms / 1000 / 2
        self._clock = clock
        self._reached_at = clock()
        self._patient_until = self._reached_at + self._patience
        self._cursor = "0"
        self._may_sweep = True

    async def run_once(self) -> None:
        """Reap, unless others may not have had the time to renew. Raises RedisError, OSError."""
        now = self._clock()
        was_silent = now - self._reached_at > self._patience
        if was_silent or now < self._patient_until:
            await self._queue.count()
        else:
            while (await self._queue.reap()).has_more:
                pass
            await self._sweep()
        self._reached_at = self._clock()
        if was_silent:
            self._patient_until = self._reached_at + self._patience

    async def _sweep(self) -> None:
        if not self._may_sweep:
            return
        swept = await self._queue.sweep(self._cursor)
        self._cursor, self._may_sweep = swept.cursor, not swept.refusal
        if swept.refusal:
            get_logger().warning("orphans stay: their keys cannot be seen", error=swept.refusal)
        if swept.num_gone:
            get_logger().info("let go of what nothing referred to", requests=swept.num_gone)
