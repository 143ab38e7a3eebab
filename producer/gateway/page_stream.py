"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from shared.ending import end

SILENCE_SECONDS = 15.0
"""After so long a comment goes out, so that proxies and pages know that the stream lives."""


def message(event: str, data: str) -> str:
    """One event; `data` is JSON, so it has no line breaks."""
    return f"event: {event}\ndata: {data}\n\n"


def event_response(request: Request, messages: AsyncGenerator[str, None]) -> StreamingResponse:
    """Sends messages as they come, until they end, the page goes away or the gateway stops."""
    stopping: asyncio.Event = request.app.state.stopping
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _with_signs_of_life(messages, stopping), media_type="text/event-stream", headers=headers
    )


async def _with_signs_of_life(
    messages: AsyncGenerator[str, None], stopping: asyncio.Event
) -> AsyncIterator[str]:
    async with aclosing(messages):
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stopping.wait())
        coming: asyncio.Future[Any] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(messages))
                await asyncio.wait(
                    {coming, stopped}, timeout=SILENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if stopped.done():
                    return
                if not coming.done():
                    yield ": still here\n\n"
                    continue
                try:
                    text = coming.result()
                except StopAsyncIteration:
                    return
                coming = None
                yield text
        finally:
            await end([it for it in (coming, stopped) if it is not None])
