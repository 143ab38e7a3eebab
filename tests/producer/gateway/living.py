"""Gateways and workers that live beside a test, in threads of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import uvicorn
from fastapi import APIRouter

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.calls.caller import Caller
from promptq.producer.gateway.app import create_app
from promptq.producer.http.auth import caller_of
from promptq.producer.http.connection_limits import bounded_protocol
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.server.acl import ROLES
from promptq.worker.serve.build import Served
from tests.support.model_free import running_worker
from tests.support.roles import as_role
from tests.support.waiting import async_until


@dataclass(frozen=True)
class LiveGateway:
    """A gateway on a port of this machine."""

    url: str

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"


def error_of(answer: httpx2.Response) -> tuple[int, str]:
    """The status and the code of an error."""
    error = answer.json()["error"]
    return answer.status_code, error["code"] if "code" in error else error["details"]["error_code"]


@contextmanager
def connected(gateway: LiveGateway) -> Iterator[socket.socket]:
    """A connection to it, on which a test sends what no client would."""
    parts = urlsplit(gateway.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        yield connection


@contextmanager
def sent(
    gateway: LiveGateway, path: str, body: bytes, headers: dict[str, str]
) -> Iterator[socket.socket]:
    """A connection on which a whole call was sent. A test that leaves it hangs up."""
    lines = {"Host": "localhost", "Content-Length": len(body), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with connected(gateway) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        yield connection


def sent_until_cut(connection: socket.socket, pieces: Iterable[bytes]) -> int:
    """Sends pieces until the gateway cuts the connection. Returns the number of bytes."""
    sent = 0
    with suppress(BrokenPipeError, ConnectionResetError):
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
    return sent


@contextmanager
def beside(living: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[Any]:
    """Yields the value of an asynchronous context, which lives in a thread until the end."""
    ready: list[Any] = []
    is_ready = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    failures: list[BaseException] = []

    async def live() -> None:
        async with living() as value:
            ready.append(value)
            is_ready.set()
            await over.wait()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(live())
        except BaseException as error:
            failures.append(error)
        finally:
            is_ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    is_ready.wait()
    try:
        if ready:
            yield ready[0]
            loop.call_soon_threadsafe(over.set)
    except BaseException:
        if thread.is_alive():
            loop.call_soon_threadsafe(over.set)
        raise
    finally:
        thread.join()
    if failures:
        raise failures[0]


@asynccontextmanager
async def serving(
    redis_url: str, caller: Caller | None = None, **settings: Any
) -> AsyncIterator[LiveGateway]:
    """A gateway under uvicorn, as the command runs it; with a caller, everybody is that one.

    In its own role, where the URL has one.
    """
    if urlsplit(redis_url).username in ROLES:
        redis_url = as_role("gateway", redis_url)
    all_settings = GatewaySettings(redis_url=redis_url, **settings)
    app = create_app(all_settings)
    if caller is not None:
        routes = APIRouter(routes=[*app.routes])
        app.routes.clear()
        app.include_router(routes)  # FastAPI replaces dependencies of included routes only
        app.dependency_overrides[caller_of] = lambda: caller
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=bounded_protocol(all_settings.http_max_connections),
        lifespan="on",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    await async_until(lambda: server.started)
    try:
        yield LiveGateway(f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        await task


@contextmanager
def live_gateway(
    redis_url: str, caller: Caller | None = None, **settings: Any
) -> Iterator[LiveGateway]:
    with beside(lambda: serving(redis_url, caller, **settings)) as gateway:
        yield gateway


@contextmanager
def live_http(
    redis_url: str, headers: dict[str, str] | None = None, **settings: Any
) -> Iterator[httpx2.Client]:
    """A plain HTTP client of a gateway."""
    with (
        live_gateway(redis_url, **settings) as gateway,
        httpx2.Client(base_url=gateway.url, headers=headers, timeout=60) as http,
    ):
        yield http


@contextmanager
def live_worker(redis_url: str, served: Served | None = None, **settings: Any) -> Iterator[Any]:
    with beside(lambda: running_worker(redis_url, served, **settings)) as worker:
        yield worker


def make_key(url: str, name: str, weight: float | None = None, **fields: Any) -> str:
    """The secret of a new key."""
    with Client(as_role("operator", url)) as client:
        return client.create_api_key(ApiKey.build(name=name, **fields), weight)[0]


def bearer(secret: str) -> dict[str, str]:
    """The header that a caller with this key sends."""
    return {"Authorization": f"Bearer {secret}"}
