"""Who runs a batch: one process, for as long as it says so."""

from __future__ import annotations

import secrets

from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue

LEASE_MS = 15_000
"""A batch whose runner said nothing for so long is given to another one."""


class RunnerLease:
    """The right to run a batch, for LEASE_MS at a time. Two never hold one."""

    def __init__(self, queue: AsyncRequestQueue, batch_id: str) -> None:
        self._queue = queue
        self._key = queue.keys.batch_runner(batch_id)
        self._holder = secrets.token_hex(8)

    async def hold(self) -> bool:
        """Whether it is ours from now on; one that ran out is taken again if nobody else did."""
        return await self._set(LEASE_MS)

    async def let_go(self) -> None:
        """Leave the batch to others, if it was ours."""
        await self._set(0)

    async def _set(self, ttl_ms: int) -> bool:
        call = scripts.hold(self._queue.keys, self._key, self._holder, ttl_ms)
        return await self._queue.run(call)
