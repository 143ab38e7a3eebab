"""Who runs a batch: one process, for as long as it says so."""

from __future__ import annotations

import secrets
from typing import Any

import redis.asyncio

from promptq.shared.protocol.keys import Keys

LEASE_MS = 15_000
"""A batch whose runner said nothing for so long is given to another one."""


class RunnerLease:
    """The right to run a batch, for LEASE_MS at a time."""

    def __init__(self, connection: redis.asyncio.Redis, keys: Keys, batch_id: str) -> None:
        self._redis: Any = connection
        self._key = keys.batch_runner(batch_id)
        self._token = secrets.token_hex(8).encode()

    async def acquire(self) -> bool:
        """Whether nobody else has it."""
        return bool(await self._redis.set(self._key, self._token, nx=True, px=LEASE_MS))

    async def renew(self) -> bool:
        """Whether it is still ours; one that ran out while the server was away is taken again."""
        held = await self._redis.get(self._key)
        if held is None:
            return await self.acquire()
        return held == self._token and bool(await self._redis.pexpire(self._key, LEASE_MS))

    async def release(self) -> None:
        if await self._redis.get(self._key) == self._token:
            await self._redis.delete(self._key)
