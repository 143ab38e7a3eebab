"""Brings back what crashed workers held, but blames nobody for an outage."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.request_queue import AsyncRequestQueue


class Reaper:
    """`run_once` is called several times a lease.

    While the server was away nobody could renew, so leases that ran out prove no crash. A worker
    that could not reach it for half a lease therefore gives the others half a lease to renew before
    it reaps again. The same goes for one that was itself frozen.
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
        self._patient_until = self._reached_at

    async def run_once(self) -> None:
        """Reap, unless others may not have had the time to renew. Raises RedisError, OSError."""
        now = self._clock()
        was_silent = now - self._reached_at > self._patience
        if was_silent or now < self._patient_until:
            await self._queue.count()
        else:
            await self._queue.reap()
        self._reached_at = self._clock()
        if was_silent:
            self._patient_until = self._reached_at + self._patience
