"""Servers that the tests run on; each test gets an empty one. And samples of matrices.

`@pytest.mark.matrix(3)` on a test with parameters: a run takes three of its cases, others each
time, as all take long. A run tells its seed at its end, and `--sample-seed` gives the same sample
again; `--whole` takes all.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio

from promptq.shared.queue import spoilt
from promptq.shared.server import retry
from tests.support.processes import hear_signals
from tests.support.roles import (
    AsyncQueueClient,
    QueueClient,
    as_role,
    forget_refusals,
    refusals,
)
from tests.support.servers import Server, embedded_server, in_database, redis_server

# Read when Triton is first imported, be it by a library. With 0 set outside, the kernels' tests use
# the GPU that is there.
os.environ.setdefault("TRITON_INTERPRET", "1")
# As workers do. More processes than cores would else spin while they wait for their threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Else each of hundreds of processes compiles all of ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

hear_signals()  # for what the product starts
gc.disable()  # until all is imported, as nothing of that is garbage

# They run real servers, which `python -m tests engines` builds first.
collect_ignore_glob = [] if os.environ.get("PROMPTQ_TEST_ENGINES") else ["programs/engines/test_*"]

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


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Threads beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def fresh_log() -> None:
    """Nothing was logged before, so nothing is left out of the log for that."""
    spoilt._logged_in.cache_clear()
    retry._said.clear()


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """An empty server of each kind in turn. fakeredis knows no roles."""
    if request.param == "fakeredis":
        state = fakeredis.FakeServer(version=(7,))
        yield Server(
            url="",
            connect=lambda role="", db=0: fakeredis.FakeRedis(server=state, db=db),
            connect_async=lambda role="", db=0: fakeredis.FakeAsyncRedis(server=state, db=db),
        )
        return
    fixture = "embedded_url" if request.param == "embedded" else "redis_server_url"
    url = request.getfixturevalue(fixture)
    with _emptied(url):
        yield Server(
            url=url,
            connect=lambda role="", db=0: (redis.Redis if role else QueueClient).from_url(
                as_role(role, in_database(url, db))
            ),
            connect_async=lambda role="", db=0: (
                redis.asyncio.Redis if role else AsyncQueueClient
            ).from_url(as_role(role, in_database(url, db))),
        )


def pytest_collection_finish() -> None:
    """No collection of garbage looks through what was imported."""
    gc.freeze()
    gc.enable()


@contextmanager
def _emptied(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    forget_refusals(url)
    yield
    assert refusals(url) == []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of matrices, not a sample")
    parser.addoption("--sample-seed", type=int, help="of the sample")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix(cases): so many of the cases are a run's sample")
    config.addinivalue_line("markers", "long: a run begins with it, so that nothing waits for it")
    if config.option.sample_seed is None:
        given = getattr(config, "workerinput", {"sample_seed": random.randrange(10**6)})
        config.option.sample_seed = given["sample_seed"]


def pytest_configure_node(node: Any) -> None:
    """xdist calls it for each of its processes, which all take the same sample."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.option.whole:
        seed = config.option.sample_seed
        terminalreporter.write_line(f"samples of matrices: --sample-seed {seed}; all: --whole")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.option.whole:
        return
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for name, those in cases.items():
        marker = those[0].get_closest_marker("matrix")
        assert marker is not None
        count = min(len(those), *marker.args)
        chosen = random.Random(f"{config.option.sample_seed} {name}").sample(those, count)
        left_out.update(item for item in those if item not in chosen)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
