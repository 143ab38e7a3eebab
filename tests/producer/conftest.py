"""Clients and readers of each kind, and a worker played by hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from promptq import Client
from tests.producer.playing import (
    PROMPTQ,
    BlockingAsyncClient,
    HandWorker,
    Reader,
    Run,
    Start,
    read_async,
    read_sync,
)
from tests.producer.webhooks.receiving import Receiver, receiver
from tests.support import processes
from tests.support.roles import QueueClient, as_role


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
def own_worker(redis_url: str) -> Iterator[HandWorker]:
    """A worker on the embedded server alone."""
    with QueueClient.from_url(as_role("", redis_url)) as connection:
        yield HandWorker(connection)


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
def environment(tmp_path: Path) -> dict[str, str]:
    """Without settings, and without anybody's running `promptq up`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTQ_")}
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


def _role_of(args: tuple[str, ...]) -> str:
    """Who gives a command."""
    roles = dict.fromkeys(("up", "supervise", "worker"), "worker")
    roles |= {"jobs": "jobs", "gateway": "gateway"}
    steering = dict.fromkeys(("keys", "pause", "resume", "drain", "webhooks", "models"), "operator")
    return (roles | steering).get(args[0], "producer")


@pytest.fixture
def run(environment: dict[str, str], redis_url: str) -> Run:
    """Runs the command to its end, on the embedded server unless told otherwise."""

    def run(
        *args: str, stdin: str = "", url: str | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        url = as_role(_role_of(args), redis_url) if url is None else url
        process = processes.start(
            *PROMPTQ,
            *args,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **({"PROMPTQ_REDIS_URL": url} if url else {}), **env},
        )
        output, errors = process.communicate(stdin)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run


@pytest.fixture
def start(environment: dict[str, str], redis_url: str) -> Iterator[Start]:
    """Starts the command; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *args: str, url: str | None = None, is_new: bool = False, **env: str
    ) -> subprocess.Popen[str]:
        url = as_role(_role_of(args), redis_url) if url is None else url
        process = processes.start(
            *[*PROMPTQ, *args],
            is_new=is_new,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **({"PROMPTQ_REDIS_URL": url} if url else {}), **env},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def receiving() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    with receiver() as found:
        yield found
