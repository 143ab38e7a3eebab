"""Returns requests of crashed workers to the queue, and deletes orphans (keys that nothing refers
to). An outage of the Redis server does not count as a crash."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from redis.exceptions import TimeoutError as RedisTimeoutError

from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger

REAPS_PER_LEASE = 4
_LEASE_REAPS = 1.5
"""After this number of missed reaps, another worker reaps."""


class Reaper:
    """Returns crashed workers' requests to the queue. Call `run_once` several times in `lease_ms`.
    Only one worker of a queue reaps at a time: the worker that holds the lease `workers:reaper`.

    No worker can renew its leases while the server accepts no writes, so an expired lease does not
    prove a crash. After an outage of at least half of `lease_ms`, the reaper waits for half of
    `lease_ms`, so that all workers can renew their leases first. The reaper also waits after its
    process was frozen, and after its start, because an outage may just have ended.

    Each call also searches one page of the server's keys for orphans, unless the server's access
    rules forbid workers to list keys.
    """

    def __init__(
        self,
        queue: AsyncRequestQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._patience = queue.lease_ms / 1000 / 2
        self._lease_ms = int(queue.lease_ms * _LEASE_REAPS / REAPS_PER_LEASE)
        self._clock = clock
        self.reached_at = clock()
        """The time at which the server last accepted a write, by `clock`, in seconds."""
        self._patient_until = self.reached_at + self._patience
        self._cursor = "0"
        self._may_sweep = True

    async def run_once(self) -> None:
        """Return requests with expired leases to the queue, and search one page of keys for
        orphans. While another worker reaps, or after an outage, only try to take the
        lease of the reaper, which one worker has at a time.

        Raises RedisError, OSError.
        """
        holds_lease = await self._hold_lease(self._lease_ms)  # refused if renewals are
        self._note_answer()
        if holds_lease and self.reached_at >= self._patient_until:
            while await self._reap():
                self._note_answer()
            await self._sweep()
            self._note_answer()

    async def leave(self) -> None:
        """Give up the lease, so that another worker reaps. Raises RedisError, OSError."""
        await self._hold_lease(0)

    async def _hold_lease(self, ttl_ms: int) -> bool:
        keys = self._queue.keys
        return await self._queue.run(scripts.hold(keys, keys.reaper, self._queue.worker_id, ttl_ms))

    async def _reap(self) -> bool:
        """Returns whether more is to be reaped. Gives up when the server is silent for too long.
        Otherwise the client would repeat the call, and the server would reap right after an outage.
        """
        try:
            async with asyncio.timeout(self._patience):
                return (await self._queue.reap()).has_more
        except TimeoutError:
            raise RedisTimeoutError(f"no answer for {self._patience:g} s") from None

    def _note_answer(self) -> None:
        # A call may outlast an outage, so only its answer shows how long the server was silent.
        now = self._clock()
        if now - self.reached_at > self._patience:
            self._patient_until = now + self._patience
        self.reached_at = now

    async def _sweep(self) -> None:
        if not self._may_sweep:
            return
        swept = await self._queue.sweep(self._cursor)
        self._cursor, self._may_sweep = swept.cursor, not swept.refusal
        if swept.refusal:
            get_logger().warning(
                "orphaned keys stay, because this user may not list keys", error=swept.refusal
            )
        if swept.num_gone:
            get_logger().info("orphaned keys removed", requests=swept.num_gone)
