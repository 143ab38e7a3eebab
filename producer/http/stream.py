"""Sends an answer as server-sent events, from its beginning or from where its client stopped.

Any gateway can resume a stream. The gateway needs only the queue's records, the address of the
stream, and the id of the last event that the client has read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from pydantic_core import to_json
from redis.exceptions import RedisError
from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from promptq.producer.calls.errors import ApiError, as_api_error
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.connection_limits import PIECES, Unfinished
from promptq.producer.http.disconnects import Answer, cancelled_if_client_leaves
from promptq.producer.http.errors import ClientLeftError
from promptq.producer.http.state import Gateway
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.places import Place
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.printable import one_line
from promptq.shared.runtime.tasks import end
from promptq.shared.runtime.turns import SLICE_SECONDS, Turns

QUEUE_EVENTS = "X-Queue-Events"
"""Header of a call: if `1`, its stream has events `queue` while the call waits."""

_PLACE_SECONDS = 2.0
"""How long a comment waits for the place of its request."""

_COMMENT = b": waiting\n"
"""A comment that keeps the connection open. No blank line follows: OpenAI's client would take it
for the end of an event."""


class Frames(Protocol):
    """Writes an answer as frames (server-sent events), from the events of its requests."""

    async def begin(self) -> None:
        """Writes the frames that precede any output: by default, none."""
        return

    def write(self, place: int, event: TokenEvent) -> Unfinished:
        """Writes the frames for an event of request number `place`, counted from 0. Returns a
        function to call and await before the next write, or None. Raises ApiError if the request
        has failed."""

    async def finish(self) -> None:
        """Writes the frames that follow the end of all requests: by default, none."""
        return

    def error(self, error: ApiError) -> bytes:
        """Returns the last frame of an answer that fails before its end."""


class Streamed(Answer, Protocol):
    """An answer that can be streamed."""

    @property
    def id(self) -> str: ...
    @property
    def url(self) -> str:
        """The path at which the stream can be read again; '' if there is no such path."""


class EventStream(Response):
    """Response that streams an answer. `begin` returns the writer of the answer's frames.

    If `is_new` is true, the status is sent with the first token, or after `http_header_seconds` if
    that is earlier. So the status can report an early error.
    """

    def __init__(
        self,
        gateway: Gateway,
        served: ServedQueue,
        streamed: Streamed,
        begin: Callable[[Out], Frames],
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
                "X-Request-Id": streamed.id,
                **({"X-Stream-Url": streamed.url} if streamed.url else {}),
            }
        )
        self._gateway = gateway
        self._served = served
        self._streamed = streamed
        self._begin = begin
        self._header_seconds = gateway.settings.http_header_seconds if is_new else 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_ids = self._streamed.request_ids
        write_piece = scope.get("extensions", {}).get(PIECES, {}).get("write")
        with_events = Headers(scope=scope).get(QUEUE_EVENTS) == "1"
        waiting = partial(_waiting_frame, self._served, self._streamed, with_events)
        out = Out(self, send, write_piece, self._gateway.settings.http_keepalive_seconds, waiting)
        try:
            async with cancelled_if_client_leaves(
                self._gateway, receive, self._served, self._streamed
            ) as is_sent:
                out.begin_after(self._header_seconds)
                frames = self._begin(out)
                try:
                    await self._stream(frames, request_ids)
                except Exception as error:  # the client must get every error
                    if not isinstance(error, ApiError | PromptqError | RedisError):
                        get_logger().exception("a stream failed", request_ids=request_ids)
                    shown = as_api_error(error)
                    # If one request failed, nobody reads the others. But if the gateway failed, for
                    # example because the server is away, the client may resume the stream.
                    if shown is error and len(request_ids) > 1:
                        self._gateway.cancels.cancel(self._served.client, request_ids)
                    if not out.has_begun:
                        raise shown from None
                    await out.write_all(frames.error(shown))
                is_sent.set()
                await out.end()
        except ClientLeftError:
            if not out.has_begun:
                raise  # so that the meter counts the client's departure
        finally:
            out.close()

    async def _stream(self, frames: Frames, request_ids: list[str]) -> None:
        await frames.begin()
        following = [
            asyncio.create_task(self._served.client.follow(one_id, partial(frames.write, place)))
            for place, one_id in enumerate(request_ids)
        ]
        try:
            await asyncio.gather(*following)  # the first error ends all of them
        finally:
            await end(following)
        await frames.finish()


def place_of(streamed_id: str, place: Place) -> dict[str, Any]:
    """Returns the place of an answer as a JSON object."""
    return {"id": streamed_id, "object": "place", **asdict(place)}


async def _waiting_frame(served: ServedQueue, streamed: Streamed, with_event: bool) -> bytes:
    """Returns a comment, or an event, with the place of an answer that waits."""
    try:
        async with asyncio.timeout(_PLACE_SECONDS):
            place = await served.client.place(streamed.request_ids[0])
    except (PromptqError, RedisError, TimeoutError):  # the stream reports the server's errors
        return _COMMENT
    if place.state is not RequestState.WAITING:
        return _COMMENT
    if with_event:
        return b"event: queue\ndata: %b\n\n" % to_json(place_of(streamed.id, place))
    return f": {place}\n".encode("ascii")


def frame_bytes(frames: str) -> bytes:
    """Returns frames as bytes. Escapes characters that some clients take for the end of a line."""
    return one_line(frames).encode()


class FramesInTurns(StreamingResponse):
    """Streams an ended answer. Builds the frames in slices, as fast as the client receives them."""

    def __init__(self, turns: Turns, frames: Iterator[str]) -> None:
        async def parts() -> AsyncIterator[bytes]:
            until, made = time.perf_counter() + SLICE_SECONDS, list[str]()
            for frame in frames:
                made.append(frame)
                if time.perf_counter() > until:
                    yield frame_bytes("".join(made))
                    await turns.give_way()
                    until, made = time.perf_counter() + SLICE_SECONDS, []
            yield frame_bytes("".join(made))

        super().__init__(parts(), media_type="text/event-stream")


class Out:
    """Sends the status and the frames of a stream. After `keepalive_seconds` without a frame, sends
    `keepalive`. If `keepalive` is None, sends the result of `waiting` instead."""

    def __init__(
        self,
        response: Response,
        send: Send,
        write_piece: Callable[[bytes], Unfinished] | None,
        keepalive_seconds: float,
        waiting: Callable[[], Awaitable[bytes]],
    ) -> None:
        self.has_begun = False
        self.keepalive: bytes | None = None
        self._waiting = waiting
        self._response = response
        self._send = send
        self._write_piece = write_piece
        self._is_open = False  # whether the head was sent, so that `write_piece` may be used
        self._unsent: deque[bytes] = deque()
        self._sending = asyncio.Lock()
        self._keepalive_seconds = keepalive_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._wrote_at = 0.0
        self._is_over = False

    def begin_after(self, seconds: float) -> None:
        """Sends the status after `seconds`, unless a frame is written earlier."""
        self._timer = self._loop.call_later(seconds, self._check_keepalive)

    def write(self, frame: bytes) -> Unfinished:
        """Writes a frame after all earlier frames. Returns a function to call and await before
        the next write, or None."""
        self._wrote_at = self._loop.time()
        if self._is_open and self._write_piece is not None:
            return self._write_piece(frame)
        self._unsent.append(frame)
        return self._send_unsent

    async def write_all(self, frame: bytes) -> None:
        """Writes a frame, and waits until more can be written."""
        if (finish := self.write(frame)) is not None:
            await finish()

    async def end(self) -> None:
        """Sends the end of the body."""
        self._is_over = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Stops the timer that sends `keepalive`."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    async def _send_unsent(self) -> None:
        async with self._sending:
            if not self.has_begun:
                self.has_begun = True
                headers = self._response.raw_headers
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            while self._unsent:
                piece = self._unsent.popleft()
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._is_open = True

    def _check_keepalive(self) -> None:
        left = self._keepalive_seconds - (self._loop.time() - self._wrote_at)
        if left <= 0 or not self.has_begun:
            self._keeping = asyncio.create_task(self._keep_alive())
            left = self._keepalive_seconds
        self._timer = self._loop.call_later(left, self._check_keepalive)

    async def _keep_alive(self) -> None:
        wrote_at = self._wrote_at
        frame = self.keepalive or await self._waiting()
        if self.has_begun and self._wrote_at > wrote_at:
            return  # the answer began meanwhile
        if not self._is_over:
            await self.write_all(self.keepalive or frame)
