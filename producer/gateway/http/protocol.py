"""HTTP/1.1 as uvicorn speaks it, with bounds on what it keeps and waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 65_536
"""Of a request's line and headers; a little more may be read at once."""

PIECES = "promptq.pieces"
"""The ASGI extension whose `write(piece)` does what `send` does with a part of the body, after the
head was sent, and does it at once: `send` goes through every layer of the application. Where the
client reads slowly it gives something `Unfinished`.
"""

Unfinished = Callable[[], Awaitable[None]] | None
"""What is to be called and awaited before more is written, if anything."""

_SILENCE_SECONDS = 60.0


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection that sends ever more of a head, or for a minute nothing of a request.

    Uvicorn would keep a head of any size, and wait for the rest of a request for ever; both before
    anybody has asked for a key. What counts is bytes that bring no request nearer: those since the
    last end of a head, piece of a body or end of a message. So endless trailers count too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_pending = 0
        self._in_head = True
        self._in_request = True  # a new connection is to send one
        self._unanswered: list[RequestResponseCycle] = []
        self._heard_at = self.loop.time()
        self._timer = self.loop.call_later(_SILENCE_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        # Uvicorn tells only the last of several requests that were sent at once.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_pending += len(data)
        super().data_received(data)
        if self._num_pending > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_request = True
        self._progressed()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not a trailer, which would change a request that is being answered
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._progressed()
        super().on_headers_complete()
        self.cycle.scope["extensions"] = {PIECES: {"write": partial(_write, self.cycle)}}
        self._unanswered = [it for it in self._unanswered if not it.response_complete]
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._progressed()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        self._progressed()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._progressed()
        super().on_response_complete()

    def _progressed(self) -> None:
        self._num_pending = 0
        self._heard_at = self.loop.time()

    def _look(self) -> None:
        """Now and then, as a timer for each piece would cost more."""
        left = self._heard_at + _SILENCE_SECONDS - self.loop.time()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_our_turn = self.flow.read_paused or (is_answering and not self._in_request)
        if left <= 0 and not is_our_turn:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(max(left, _SILENCE_SECONDS / 60), self._look)


def _write(cycle: RequestResponseCycle, piece: bytes) -> Unfinished:
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if cycle.flow.write_paused:
            drain: Unfinished = cycle.flow.drain
            return drain
    return None
