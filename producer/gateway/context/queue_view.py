"""What a gateway must know of its queue before it takes a request, looked up once a second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from promptq.producer.clients.connecting import explained
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.tool_call_style import ToolCallStyle

_FRESH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class QueueView:
    """The model's name is empty as long as no worker ever came."""

    model: str
    tool_call_style: ToolCallStyle | None
    has_worker: bool


class QueueWatch:
    """Looks when asked. Raises RedisSideError where the server does not answer."""

    def __init__(self, connection: redis.asyncio.Redis, keys: Keys, url: str) -> None:
        self._redis: Any = connection
        self._keys = keys
        self._url = url
        self._seen: QueueView | None = None
        self._seen_at = 0.0
        self._looking = asyncio.Lock()

    async def look(self, *, now: bool = False) -> QueueView:
        """The queue as it was a second ago at most, or as it is `now`."""
        async with self._looking:
            is_old = time.monotonic() - self._seen_at > _FRESH_SECONDS
            if self._seen is None or is_old or now:
                with explained(self._url):
                    self._seen = await self._read()
                self._seen_at = time.monotonic()
            return self._seen

    async def _read(self) -> QueueView:
        pipeline = self._redis.pipeline(transaction=False)
        for key in (self._keys.model, self._keys.config):  # earlier releases told in `config`
            pipeline.hmget(key, "model", "tool_call_style")
        pipeline.time()
        latest_first: Any = {"desc": True, "byscore": True, "offset": 0, "num": 1}
        pipeline.zrange(self._keys.workers, "+inf", "-inf", withscores=True, **latest_first)
        told, told_before, (seconds, _), latest = await pipeline.execute()
        model, style = told if told[0] is not None else told_before
        return QueueView(
            model=(model or b"").decode(),
            tool_call_style=ToolCallStyle.from_json(style) if style else None,
            has_worker=bool(latest) and latest[0][1] >= seconds * 1000,
        )
