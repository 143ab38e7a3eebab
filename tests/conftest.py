"""Servers that the tests run on. Each test gets an empty one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import fakeredis
import pytest
import redis
import redis.asyncio

from shared.embedded import EmbeddedServer
from tests.helpers import Server, redis_server

# Read when Triton is first imported, be it by a library. With 0 set outside, the kernels' tests use
# the GPU that is there.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Where a shell starts the tests in the background, interrupts are ignored by all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

SERVERS = ["fakeredis", "embedded", "redis-server"]


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from redis_server(tmp_path_factory)


@pytest.fixture
def redis_url(embedded_url: str) -> str:
    """An empty embedded server."""
    with redis.Redis.from_url(embedded_url) as client:
        client.flushall()
    return embedded_url


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    """An empty server of each kind in turn."""
    if request.param == "fakeredis":
        state = fakeredis.FakeServer(version=(7,))
        return Server(
            url="",
            connect=lambda: fakeredis.FakeRedis(server=state),
            connect_async=lambda: fakeredis.FakeAsyncRedis(server=state),
        )
    fixture = "embedded_url" if request.param == "embedded" else "redis_server_url"
    url = request.getfixturevalue(fixture)
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return Server(
        url=url,
        connect=lambda: redis.Redis.from_url(url),
        connect_async=lambda: redis.asyncio.Redis.from_url(url),
    )
