"""Writes down when API keys are used, each at most once a minute."""

from __future__ import annotations

import math
import time
from contextlib import suppress

from redis.exceptions import RedisError

from promptq.producer.admin import api_keys
from promptq.shared.errors import RedisSideError
from promptq.shared.queue.request_queue import AsyncRequestQueue

_EVERY_SECONDS = 60.0


class KeyUses:
    """The uses that one gateway has written down."""

    def __init__(self, queue: AsyncRequestQueue) -> None:
        self._queue = queue
        self._noted: dict[str, float] = {}

    async def note(self, secret: str) -> None:
        """Write down that a known key is used, unless that was done within the last minute.

        If it cannot be written, it is left out.
        """
        hashed, now = api_keys.hash_of(secret), time.monotonic()
        if now - self._noted.get(hashed, -math.inf) < _EVERY_SECONDS:
            return
        self._noted[hashed] = now
        call = api_keys.note_use(self._queue.keys, secret, int(time.time() * 1000))
        with suppress(RedisError, RedisSideError):
            await self._queue.run(call)
