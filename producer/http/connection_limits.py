"""Limits the memory and the waiting times of uvicorn's HTTP/1.1 protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from promptq.producer.calls.errors import ApiError
from promptq.producer.http.errors import response_of
from promptq.producer.http.meter import POLLED

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 65_536
"""The most bytes of a request's head: its first line and its headers. The size is checked after
each read from the socket, so the last read may exceed the limit."""

PIECES = "promptq.pieces"
"""Name of an ASGI extension. Its function `write(piece)` sends a part of a body after the head of
the answer, and returns an `Unfinished`. ASGI's `send` is slower, because it passes every layer."""

Unfinished = Callable[[], Awaitable[None]] | None
"""A function to call and await before the next write; None if the next write need not wait."""

_SILENCE_SECONDS = 60.0
"""The most seconds between two requests of a connection. The first `_WINDOW_BYTES` of a body must
arrive within the same time."""
_HEAD_SECONDS = 20.0
"""The most seconds from a request's first byte to the end of its head."""
_WINDOW_SECONDS = 15.0
"""The most seconds for each `_WINDOW_BYTES` of a body, except the first. One limit for the whole
body would have to be long, and would let a client stop in the middle."""
_WINDOW_BYTES = 65_536
"""The arrival of a body is timed in parts of this many bytes."""
_MOST_DROPPED_BYTES = 1 << 28
_DROPPED_BYTES_A_SECOND = 8 << 20
_DROP_SECONDS = 30.0
"""The most seconds for which the gateway reads and drops the rest of a body after the answer. If
the gateway closed the connection earlier, a client that still sends might lose the answer."""
_UNREAD_SECONDS = 600.0
"""Seconds after which a client that reads nothing of an answer is disconnected."""
_MOST_SMALL_PIECES = 4096
_PIECE_BYTES = 16
"""The smallest mean size of a body's pieces, after the first `_MOST_SMALL_PIECES`."""
_LENGTHS = (b"content-length", b"transfer-encoding")
_MOST_PIPELINED = 16
"""The most requests of a connection that may wait for an earlier one. Uvicorn has no limit."""
_CHECK_SECONDS = 2.0
"""Seconds between two checks of a connection's times. A timer for each piece would cost more."""
_RESERVED_CONNECTIONS = 64
"""Number of connections beyond the limit, accepted only to answer the probes in `POLLED`."""

_FULL = ApiError(
    503,
    "the gateway cannot take more connections; try again soon",
    code="connections",
    headers={"Retry-After": "1", "Connection": "close"},
)


class _StayingParser(httptools.HttpRequestParser):
    """A parser that ignores offers to change to another protocol, such as offers of HTTP/2 by Java.

    httptools stops after the head of a request with an offer, and uvicorn would drop the body. So
    this parser creates a new one. The new parser reads a made-up head with the body's length (while
    `continues` is set), and then the body.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self.continues = False
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        parser, feed = self, httptools.HttpRequestParser.feed_data
        while True:
            try:
                return feed(parser, data)
            except httptools.HttpParserUpgrade as stop:
                data = data[stop.args[0] :]
            headers = self._protocol.headers
            lengths = b"".join(b"%b: %b\r\n" % each for each in headers if each[0] in _LENGTHS)
            parser = self._protocol.parser = _StayingParser(self._protocol)
            parser.continues = True
            feed(parser, b"POST / HTTP/1.1\r\n%b\r\n" % lengths)
            parser.continues = False


class BoundedProtocol(HttpToolsProtocol):
    """Protocol that closes a connection whose request has too large a head, or arrives slowly.

    Uvicorn alone would store a head of any size, and wait for ever for the rest of a request. A
    client would not even need an API key. The size of a head is measured as the bytes since the
    last progress: the end of a head, a piece of a body or the end of a message. So trailers count,
    too. If a request is answered before its whole body has arrived, the rest is read and dropped
    for some seconds.
    """

    parser: _StayingParser

    def __init__(self, *args: Any, max_connections: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _StayingParser(self)
        self._max_connections = max_connections
        self._num_pending = 0  # bytes since the last progress
        self._in_head = True
        self._in_request = True  # a new connection must send a request
        self._num_body_bytes = 0  # in this window
        self._has_filled_window = False
        self._num_dropped_bytes = 0
        self._num_pieces = self._num_bytes = 0  # of a body
        self._closes_behind_request = False
        self._unanswered: list[RequestResponseCycle] = []
        self._began_at = self._checked_at = self._taken_at = self.loop.time()
        self._paused_seconds = 0.0  # since `_began_at`; while paused, the gateway reads nothing
        self._num_unsent = 0
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check_times)

    # Like uvicorn's class, this accepts only a Transport. Asyncio's protocol accepts any kind.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is None:
            return
        beyond = len(self.connections) - self._max_connections
        if beyond > _RESERVED_CONNECTIONS:
            transport.abort()
        elif beyond > 0:
            self.app = _for_probes_only(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        # Of several requests that were sent together, uvicorn reports only the last one.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_pending += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_pending > MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
        elif self._is_dropping:  # slowly, because streams wait meanwhile
            self.flow.pause_reading()
            self.loop.call_later(len(data) / _DROPPED_BYTES_A_SECOND, self._resume_reading)

    def on_message_begin(self) -> None:
        if self.parser.continues:
            return
        super().on_message_begin()
        self._in_head = self._in_request = True
        self._num_pieces = self._num_bytes = 0
        self._progressed()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not a trailer, which would change a request that is being answered
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.continues:
            return
        self._in_head = False
        self._progressed()
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_PIPELINED:
            raise ValueError("too many requests wait behind one")  # the parser ends in status 400
        self.cycle.scope["extensions"] = {PIECES: {"write": partial(_write, self.cycle)}}
        if self.scope["http_version"] == "1.0":
            # Uvicorn's `send` is a method. A function here hides the method for this cycle only.
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign, assignment]
            # A client of HTTP/1.0 would read `100 Continue` as the answer.
            self.cycle.waiting_for_100_continue = False
        if not self.cycle.keep_alive:
            self.cycle.transport = cast(asyncio.Transport, _ClosedBehindRequest(self))
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        self._num_pieces += 1
        self._num_bytes += len(body)
        if self._num_pieces > _MOST_SMALL_PIECES + self._num_bytes // _PIECE_BYTES:
            raise ValueError("the body comes in too small pieces")  # status 400, as above
        if self.cycle.response_complete:
            self._num_dropped_bytes += len(body)
            if self._num_dropped_bytes > _MOST_DROPPED_BYTES:
                self.transport.close()
            return
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= _WINDOW_BYTES:
            self._begin_window()
            self._has_filled_window = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser continues with the body
        self._in_request = False
        self._progressed()
        super().on_message_complete()
        if self._closes_behind_request:
            self.transport.close()

    def on_response_complete(self) -> None:
        self._progressed()
        for cycle in self._unanswered:
            if cycle.response_complete:
                cycle.body = bytearray()  # drops the unread part
        super().on_response_complete()

    @property
    def _is_dropping(self) -> bool:
        in_body = self._in_request and not self._in_head
        return in_body and self.cycle is not None and self.cycle.response_complete

    def _resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def close_behind_request(self) -> None:
        """Closes the connection after the whole current request has arrived."""
        if self._in_request:
            self._closes_behind_request = True
        else:
            self.transport.close()

    def _progressed(self) -> None:
        self._num_pending = self._num_dropped_bytes = 0
        self._has_filled_window = False
        self._begin_window()

    def _begin_window(self) -> None:
        self._num_body_bytes = 0
        self._paused_seconds = 0.0
        self._began_at = self.loop.time()

    def _check_times(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:
            self._paused_seconds += now - max(self._checked_at, self._began_at)
        self._checked_at = now
        num_unsent = self.transport.get_write_buffer_size()
        if not num_unsent or num_unsent < self._num_unsent:
            self._taken_at = now
        self._num_unsent = num_unsent
        is_closing = self.transport.is_closing()  # a closing transport still sends the rest
        if now - self._taken_at > (_SILENCE_SECONDS if is_closing else _UNREAD_SECONDS):
            self.transport.abort()
            return
        if now - self._began_at - self._paused_seconds > self._most_seconds():
            self.transport.close()
        self._timer = self.loop.call_later(_CHECK_SECONDS, self._check_times)

    def _most_seconds(self) -> float:
        if not self._in_request:
            is_answering = self.cycle is not None and not self.cycle.response_complete
            return inf if is_answering else _SILENCE_SECONDS
        if self._in_head:
            return _HEAD_SECONDS
        if self._is_dropping:
            return _DROP_SECONDS
        return _WINDOW_SECONDS if self._has_filled_window else _SILENCE_SECONDS


def bounded_protocol(max_connections: int) -> type[BoundedProtocol]:
    """Returns the protocol with this limit of connections, for uvicorn's option `http`."""
    return cast(type[BoundedProtocol], partial(BoundedProtocol, max_connections=max_connections))


class _ClosedBehindRequest:
    """Transport whose `close` waits until the whole current request has arrived."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._transport = protocol.transport

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._protocol.close_behind_request()


def _for_probes_only(app: ASGI3Application) -> ASGI3Application:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        polled = scope["type"] == "http" and scope["path"] in POLLED
        await (app if polled else response_of(_FULL, scope.get("path", "")))(scope, receive, send)

    return answer


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Returns the `send` function of a cycle (one request and its answer) for a client of HTTP/1.0,
    which does not support chunks. A body without a known length ends with the connection."""
    send, has_length = cycle.send, True

    async def send_unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            if not (has_length := b"content-length" in names):
                cycle.chunked_encoding = False
        if not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


def _write(cycle: RequestResponseCycle, piece: bytes) -> Unfinished:
    if not cycle.disconnected:
        framed = b"%x\r\n%b\r\n" % (len(piece), piece) if cycle.chunked_encoding else piece
        cycle.transport.write(framed)
        if cycle.flow.write_paused:
            drain: Unfinished = cycle.flow.drain
            return drain
    return None
