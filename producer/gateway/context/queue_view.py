"""What a gateway must know about its queue to take requests, read at most once a second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from promptq.shared.protocol.tool_call_style import ToolCallStyle
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import AsyncRequestQueue

_FRESH_SECONDS = 1.0
_TOLD = ("model", "tool_call_style")


@dataclass(frozen=True, slots=True)
class QueueView:
    """The model's name is empty until the first worker has come."""

    model: str
    tool_call_style: ToolCallStyle | None
    has_worker: bool


class QueueWatch:
    """Reads the view when it is asked for. Raises redis.RedisError if the server is away."""

    def __init__(self, queue: AsyncRequestQueue) -> None:
        self._queue = queue
        self._seen: QueueView | None = None
        self._seen_at = 0.0
        self._looking = asyncio.Lock()

    async def look(self, *, now: bool = False) -> QueueView:
        """The queue as it was at most a second ago; with `now`, as it is now."""
        async with self._looking:
            is_old = time.monotonic() - self._seen_at > _FRESH_SECONDS
            if self._seen is None or is_old or now:
                self._seen = await self._read()
                self._seen_at = time.monotonic()
            return self._seen

    async def _read(self) -> QueueView:
        keys = self._queue.keys
        calls: list[Call[Any]] = [
            Call("", ["HMGET", keys.model, *_TOLD], list, lambda: [None, None]),
            Call("", ["HMGET", keys.config, *_TOLD], list),
            lookups.server_time_ms(),
        ]
        told, told_before, now_ms = await self._queue.run(calls)
        workers = await self._queue.run(lookups.live_worker_ids(keys, now_ms))
        # Workers of earlier releases write it into `config`.
        model, style = told if told[0] is not None else told_before
        return QueueView(
            model=(model or b"").decode(errors="replace"),
            tool_call_style=ToolCallStyle.from_json(style) if style else None,
            has_worker=bool(workers),
        )
