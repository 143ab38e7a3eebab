"""Writes down when API keys are used: each at most once a minute, whatever comes with it."""

from __future__ import annotations

import time
from contextlib import suppress

from redis.exceptions import RedisError

from promptq.producer.admin import api_keys
from promptq.shared.errors import RedisSideError
from promptq.shared.queue.request_queue import AsyncRequestQueue

_EVERY_SECONDS = 60.0


class KeyUses:
    """What one gateway has written down."""

    def __init__(self, queue: AsyncRequestQueue) -> None:
        self._queue = queue
        self._noted: dict[str, float] = {}

    def is_due(self, secret: str) -> bool:
        """Whether the use of a key is to be noted again."""
        noted = self._noted.get(api_keys.hash_of(secret))
        return noted is None or time.monotonic() - noted >= _EVERY_SECONDS

    async def note(self, secret: str) -> None:
        """A key that is known was used just now. Where that cannot be written, it is left."""
        self._noted[api_keys.hash_of(secret)] = time.monotonic()
        call = api_keys.note_use(self._queue.keys, secret, int(time.time() * 1000))
        with suppress(RedisError, RedisSideError):
            await self._queue.run(call)
