"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi.responses import StreamingResponse

SILENCE_SECONDS = 15.0
"""After so long a comment goes out, so that proxies and pages know that the stream lives."""


def message(event: str, data: str) -> str:
    """One event; `data` is JSON, so it has no line breaks."""
    return f"event: {event}\ndata: {data}\n\n"


def event_response(messages: AsyncGenerator[str, None]) -> StreamingResponse:
    """Sends messages as they come, until they end or the page goes away."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _with_signs_of_life(messages), media_type="text/event-stream", headers=headers
    )


async def _with_signs_of_life(messages: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    async with aclosing(messages):
        coming: asyncio.Future[str] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(messages))
                done, _ = await asyncio.wait({coming}, timeout=SILENCE_SECONDS)
                if not done:
                    yield ": still here\n\n"
                    continue
                try:
                    text = coming.result()
                except StopAsyncIteration:
                    return
                coming = None
                yield text
        finally:
            if coming is not None and not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
