"""Servers that the tests run on. Each test gets an empty one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import fakeredis
import pytest
import redis
import redis.asyncio

from tests.matrices import (  # noqa: F401  # pytest looks for them here
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_terminal_summary,
)
from tests.processes import hear_signals
from tests.roles import (
    AsyncQueueClient,
    QueueClient,
    as_role,
    forget_refusals,
    refusals,
)
from tests.servers import Server, embedded_server, redis_server

# Read when Triton is first imported, be it by a library. With 0 set outside, the kernels' tests use
# the GPU that is there.
os.environ.setdefault("TRITON_INTERPRET", "1")

hear_signals()  # for what the product starts

SERVERS = ["fakeredis", "embedded", "redis-server"]


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    """Its default user's, who may do anything."""
    with embedded_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As `embedded_url`."""
    yield from redis_server(tmp_path_factory)


@pytest.fixture
def redis_url(embedded_url: str) -> Iterator[str]:
    """An empty embedded server, for a producer; `as_role` makes it another's.

    Afterwards no role may have been refused anything.
    """
    with _emptied(embedded_url):
        yield as_role("producer", embedded_url)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """An empty server of each kind in turn. fakeredis knows no roles."""
    if request.param == "fakeredis":
        state = fakeredis.FakeServer(version=(7,))
        yield Server(
            url="",
            connect=lambda *_: fakeredis.FakeRedis(server=state),
            connect_async=lambda *_: fakeredis.FakeAsyncRedis(server=state),
        )
        return
    fixture = "embedded_url" if request.param == "embedded" else "redis_server_url"
    url = request.getfixturevalue(fixture)
    with _emptied(url):
        yield Server(
            url=url,
            connect=lambda role="": (redis.Redis if role else QueueClient).from_url(
                as_role(role, url)
            ),
            connect_async=lambda role="": (
                redis.asyncio.Redis if role else AsyncQueueClient
            ).from_url(as_role(role, url)),
        )


@contextmanager
def _emptied(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    forget_refusals(url)
    yield
    assert refusals(url) == []
