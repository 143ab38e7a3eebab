"""An answer as server-sent events, from the first chunk or from where a client stopped reading.

Nothing that is needed to go on lives in this process: all of it is in the queue's records, in the
address of the stream and in the ids of its events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producer.gateway.context import Gateway
from producer.gateway.errors import ApiError, ClientLeftError, as_api_error
from producer.gateway.http_protocol import PIECES
from producer.gateway.merging import events_of
from producer.gateway.openai.chunks import ChoiceWriter, usage_chunk
from producer.gateway.openai.completion import Completion
from producer.gateway.openai.endings import failure
from producer.gateway.openai.positions import Position, event_id
from producer.gateway.presence import while_present
from shared.errors import PromptqError
from shared.events import Usage
from shared.tool_call_style import ToolCallStyle

_COMMENT = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Streams a completion. A client that leaves cancels it, unless it said that it comes back.

    The status of a new one waits for the first token, a while at least, so that it can tell what
    goes wrong before.
    """

    def __init__(
        self,
        gateway: Gateway,
        completion: Completion,
        have: Sequence[Position] = (),
        *,
        is_new: bool = False,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "X-Request-Id": completion.id,
                "X-Stream-Url": completion.url,
            }
        )
        self._gateway = gateway
        self._completion = completion
        self._header_seconds = gateway.settings.http_header_seconds if is_new else 0.0
        self._have = have or [Position()] * completion.num_choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_ids = self._completion.request_ids
        write_piece = scope.get("extensions", {}).get(PIECES, {}).get("write")
        out = _Out(self, send, write_piece, self._gateway.settings.http_keepalive_seconds)
        try:
            async with while_present(receive) as presence:
                out.begin_after(self._header_seconds)
                try:
                    # This task wakes up through every layer of the application, for each token.
                    await asyncio.create_task(self._stream(out, request_ids))
                except (ApiError, PromptqError) as error:
                    told = as_api_error(error) if isinstance(error, PromptqError) else error
                    if len(request_ids) > 1:  # the others would go on for nobody
                        self._gateway.cancels.cancel(request_ids)
                    if not out.has_begun:
                        raise told from None
                    await out.write(_error_frame(told))
                presence.is_over = True
                await out.end()
        except ClientLeftError:
            if not self._completion.detach:
                self._gateway.cancels.cancel(request_ids)
        finally:
            out.close()

    async def _stream(self, out: _Out, request_ids: list[str]) -> None:
        completion = self._completion
        writers: list[ChoiceWriter] = []
        positions: list[str] = []
        num_tokens = 0
        async with aclosing(events_of(self._gateway.client, request_ids)) as events:
            async for index, event in events:
                if event.finish_reason is not None:
                    so_far = num_tokens + event.end
                    if (error := failure(event.finish_reason, event.error, so_far)) is not None:
                        raise error
                if not writers:
                    completion, style = await learned(self._gateway, completion)
                    writers = [
                        ChoiceWriter(completion, place, have, style)
                        for place, have in enumerate(self._have)
                    ]
                    positions = [writer.position for writer in writers]
                num_tokens += len(event.token_ids)
                writer = writers[index]
                if (chunk := writer.chunk(event)) is not None:
                    positions[index] = writer.position
                    last_id = event_id(completion.id, positions)
                    await out.write(f"id: {last_id}\ndata: {chunk}\n\n".encode("ascii"))
        if completion.include_usage:
            usages = [writer.usage or Usage() for writer in writers]
            await out.write(f"data: {usage_chunk(completion, usages)}\n\n".encode("ascii"))
        await out.write(_DONE)


async def learned(
    gateway: Gateway, completion: Completion
) -> tuple[Completion, ToolCallStyle | None]:
    """With what is known once there is an event: the model's name, and how it calls tools.

    The worker that sent it has told them before.
    """
    if completion.model and not completion.with_tools:
        return completion, None
    view = await gateway.watch.look()
    if not view.model or view.tool_call_style is None:  # perhaps it was told just now
        view = await gateway.watch.look(now=True)
    if not completion.model:
        completion = replace(completion, model=view.model)
    return completion, view.tool_call_style


class _Out:
    """The way to the client: a status, frames, and comments when there were none for a while."""

    def __init__(
        self,
        response: Response,
        send: Send,
        write_piece: Callable[[bytes], Awaitable[None]] | None,
        keepalive_seconds: float,
    ) -> None:
        self.has_begun = False
        self._response = response
        self._send = send
        self._write_piece = write_piece or self._send_piece
        self._keepalive_seconds = keepalive_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None
        self._wrote_at = 0.0
        self._is_over = False

    def begin_after(self, seconds: float) -> None:
        """Send the status after so long, if nothing has been written before."""
        self._timer = self._loop.call_later(seconds, self._ring)

    async def write(self, frame: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = self._response.raw_headers
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._wrote_at = self._loop.time()
        await self._write_piece(frame)

    async def end(self) -> None:
        self._is_over = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Nothing is written any more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    async def _send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def _ring(self) -> None:
        """Looks now and then whether a comment is due: a timer for each token would cost more."""
        left = self._keepalive_seconds - (self._loop.time() - self._wrote_at)
        if left <= 0 or not self.has_begun:
            self._commenting = asyncio.create_task(self._comment())
            left = self._keepalive_seconds
        self._timer = self._loop.call_later(left, self._ring)

    async def _comment(self) -> None:
        if not self._is_over:
            await self.write(_COMMENT)


def _error_frame(error: ApiError) -> bytes:
    return b"data: " + cast(bytes, error.response().body) + b"\n\n"
