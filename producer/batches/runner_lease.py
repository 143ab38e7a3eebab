"""The lease of a batch's runner: one process runs a batch, as long as it renews the lease."""

from __future__ import annotations

import secrets

from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue

LEASE_MS = 15_000
"""If a runner does not renew its lease for this time, another process gets the batch."""


class RunnerLease:
    """The right to run a batch, for LEASE_MS at a time. Only one process holds it."""

    def __init__(self, queue: AsyncRequestQueue, batch_id: str) -> None:
        self._queue = queue
        self._key = queue.keys.batch_runner(batch_id)
        self._holder = secrets.token_hex(8)

    async def hold(self) -> bool:
        """Take or renew the lease. Gives whether it is ours now."""
        return await self._set(LEASE_MS)

    async def let_go(self) -> None:
        """Give the lease back, if it is ours."""
        await self._set(0)

    async def _set(self, ttl_ms: int) -> bool:
        call = scripts.hold(self._queue.keys, self._key, self._holder, ttl_ms)
        return await self._queue.run(call)
