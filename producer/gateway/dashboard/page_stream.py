"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) for pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from redis.exceptions import RedisError

from promptq.producer.calls.errors import ApiError
from promptq.producer.http.auth import admin_of, caller_of
from promptq.producer.http.state import Gateway
from promptq.shared.errors import PromptqError
from promptq.shared.runtime.tasks import end

SILENCE_SECONDS = 15.0
"""Seconds of silence after which a comment is sent, so that proxies and pages see a live stream."""
CHECK_SECONDS = 3.0
"""Seconds between two checks whether the caller's key is still valid."""


def message(event: str, data: str) -> str:
    """Returns one event as text. `data` is JSON, so it has no line breaks."""
    return f"event: {event}\ndata: {data}\n\n"


def event_response(
    request: Request, gateway: Gateway, messages: AsyncGenerator[str, None]
) -> StreamingResponse:
    """Returns a response that sends messages until the messages, the connection or the gateway end.

    The response also ends when the caller may no longer read. Then the page reconnects, and gets an
    error that says why.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _until_over(request, gateway, messages), media_type="text/event-stream", headers=headers
    )


async def _until_over(
    request: Request, gateway: Gateway, messages: AsyncGenerator[str, None]
) -> AsyncIterator[str]:
    stopping: asyncio.Event = request.app.state.stopping
    async with aclosing(messages):
        over: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(stopping.wait()),
            asyncio.ensure_future(_refused(request, gateway)),
        }
        coming: asyncio.Future[Any] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(messages))
                await asyncio.wait(
                    {coming, *over}, timeout=SILENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if any(task.done() for task in over):
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
            await end([*over, *([coming] if coming is not None else [])])


async def _refused(request: Request, gateway: Gateway) -> None:
    """Waits until the caller is refused, for example because its key was revoked."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        try:
            await admin_of(await caller_of(gateway, request))
        except ApiError:
            return
        except (PromptqError, RedisError):
            continue  # unknown at the moment; the stream itself reports the error
