"""What a strange server may send, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from promptq.worker.upstream.faults import OverloadedError, ServerFaultError
from promptq.worker.upstream.server import Server
from tests.servers import free_port


@asynccontextmanager
async def answering(handler: web.Handler, idle_seconds: float = 60.0) -> AsyncIterator[Server]:
    """The client of a server that answers each call so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with (
        TestServer(app) as there,
        talking_to(str(there.make_url("")).rstrip("/"), idle_seconds) as server,
    ):
        yield server


@asynccontextmanager
async def talking_to(url: str, idle_seconds: float = 60.0) -> AsyncIterator[Server]:
    server = Server(url, idle_seconds=idle_seconds)
    try:
        yield server
    finally:
        await server.close()


async def read(server: Server) -> list[bytes]:
    """All events of a stream."""
    async with server.stream("/", {}) as events:
        return [data async for data in events]


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("3", 3.0), ("0", 0.0), ("-1", 0.0), ("86400", 60.0), ("inf", None), ("nan", None)],
)
async def test_the_time_to_come_back_is_a_time_to_wait_for(
    told: str, seconds: float | None
) -> None:
    async def overloaded(_: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": told})

    async with answering(overloaded) as server:
        with pytest.raises(OverloadedError) as caught:
            await server.get("/")
    assert caught.value.seconds == seconds


async def test_an_event_without_an_end_does_not_fill_the_memory() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 2**16)

    async with answering(endless) as server:
        with pytest.raises(ServerFaultError, match="a line of more than"):
            await read(server)


async def test_a_server_that_is_away_is_named_with_the_reason_alone() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with talking_to(url) as server:
        with pytest.raises(ServerFaultError, match=f"^{url}: Connection refused$"):
            await server.get("/")


async def test_a_server_of_another_protocol_is_named_as_such() -> None:
    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+PONG\r\n")
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with other, talking_to(f"http://127.0.0.1:{port_of(other)}") as server:
        with pytest.raises(ServerFaultError, match="does not answer as an HTTP server"):
            await server.get("/")


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def test_comments_do_not_keep_a_frozen_stream_alive() -> None:
    async def frozen(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        while True:
            await response.write(b": ping\n\n")
            await asyncio.sleep(0.02)

    async with answering(frozen, idle_seconds=0.5) as server:
        with pytest.raises(ServerFaultError, match="silent for too long"):
            await read(server)
