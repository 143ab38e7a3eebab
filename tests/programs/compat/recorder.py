"""Records the traffic between a program and the gateway, without changing the traffic."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

_KEPT_BYTES = 20_000
"""The recorded bytes of each body."""


@dataclass
class Exchange:
    """A request as the program sent it, and its answer."""

    began: float
    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    status: int = 0
    answer: str = ""


class _Side:
    """Collects the messages that `httptools` parses in one direction of a connection."""

    def __init__(self, connection: _Connection, *, is_request: bool) -> None:
        self._connection = connection
        self._is_request, self._broken = is_request, False
        self._parser = self._new_parser()
        self._exchange: Exchange | None = None

    def feed(self, data: bytes) -> None:
        if not self._broken:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                self._broken = True
        if not self._is_request and self._exchange and self._exchange.method == "HEAD":
            self._parser = self._new_parser()  # this one waits for a body, which does not come

    def _new_parser(self) -> Any:
        if self._is_request:
            return httptools.HttpRequestParser(self)
        return httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._exchange = self._connection.next_one(is_request=self._is_request)

    def on_url(self, url: bytes) -> None:
        if self._exchange:
            self._exchange.path += url.decode(errors="replace")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange and self._is_request:
            self._exchange.headers[name.decode().lower()] = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        if self._exchange and self._is_request:
            self._exchange.method = self._parser.get_method().decode()
        elif self._exchange:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange:
            name = "body" if self._is_request else "answer"
            kept = getattr(self._exchange, name) + body.decode(errors="replace")
            setattr(self._exchange, name, kept[:_KEPT_BYTES])


class _Connection:
    """A connection's exchanges: answers come in the order of the requests."""

    def __init__(self, kept: list[Exchange]) -> None:
        self._kept, self._own, self._num_answers = kept, list[Exchange](), 0

    def next_one(self, *, is_request: bool) -> Exchange | None:
        if is_request:
            self._own.append(Exchange(time.time()))
            self._kept.append(self._own[-1])
            return self._own[-1]
        self._num_answers += 1
        return self._own[self._num_answers - 1] if self._num_answers <= len(self._own) else None


@contextmanager
def recorded(port: int, gateway_port: int) -> Iterator[list[Exchange]]:
    """Forward connections from `port` to the gateway until the end of the context. Yields the list
    of exchanges so far."""
    kept: list[Exchange] = []

    async def pump(source: asyncio.StreamReader, to: asyncio.StreamWriter, side: _Side) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                side.feed(data)
                to.write(data)
                await to.drain()
        to.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", gateway_port)
        connection = _Connection(kept)
        await asyncio.gather(
            pump(reader, ours, _Side(connection, is_request=True)),
            pump(theirs, writer, _Side(connection, is_request=False)),
        )

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
