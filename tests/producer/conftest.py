"""Clients and readers of each kind, and a worker played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from promptq import Client
from tests.producer.playing import (
    BlockingAsyncClient,
    HandWorker,
    Reader,
    read_async,
    read_sync,
)
from tests.producer.webhooks.receiving import Receiver, receiver
from tests.support.roles import as_role


@pytest.fixture
def redis_url(redis_url: str) -> str:
    """For an operator: tests play a worker by hand, and steer; commands run in a role each."""
    return as_role("operator", redis_url)


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which client reads."""
    return str(request.param)


@pytest.fixture
def read(server: Any, kind: str) -> Iterator[Callable[..., Reader]]:
    """Starts readers on a server of each kind, with each client."""
    start, connect = (
        (read_sync, server.connect) if kind == "sync" else (read_async, server.connect_async)
    )
    readers: list[Reader] = []

    def read(
        request_id: str, *, from_index: int = 0, silence_seconds: float = 60.0, db: int = 0
    ) -> Reader:
        """A silence so long shows that nothing but the rule under test brought the events."""
        options = {"silence_seconds": silence_seconds}
        readers.append(start(partial(connect, "producer", db), request_id, options, from_index))
        return readers[-1]

    return read


@pytest.fixture
def worker(server: Any) -> Iterator[HandWorker]:
    with closing(server.connect()) as connection:
        yield HandWorker(connection)


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with closing(server.connect("producer")) as connection, Client(connection) as client:
        yield client


@pytest.fixture
def make_client(kind: str) -> Iterator[Callable[..., Any]]:
    """Makes clients of each kind; what it made is closed after the test."""
    with asyncio.Runner() as runner:
        made: list[Any] = []

        def make(*args: Any, **options: Any) -> Any:
            if kind == "sync":
                made.append(Client(*args, **options))
            else:
                made.append(BlockingAsyncClient(runner, *args, **options))
            return made[-1]

        yield make
        for client in made:
            client.close()


@pytest.fixture
def any_client(make_client: Callable[..., Any], redis_url: str) -> Any:
    """A client of each kind on the embedded server."""
    return make_client(redis_url)


@pytest.fixture
def receiving() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    with receiver() as found:
        yield found
