"""Servers that the tests run on, empty for each, and commands. And samples of matrices.

`@pytest.mark.matrix(3)` on a test with parameters: a run takes three of its cases, others each
time, as all take long. With `@pytest.mark.matrix(1 / 3)`, one run in three takes the test. A run
takes each test that could run on several servers on one of them. A run tells its seed at its end,
and `--sample-seed` gives the same sample again; `--whole` takes all.
"""

from __future__ import annotations

import gc
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
from execnet import gateway_io

from promptq.shared.queue import spoilt
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.server import retry
from tests.producer.playing import PROMPTQ, HandWorker, Run, Start
from tests.support import library_caches, processes
from tests.support.fork_server import TESTS, ForkedProcess, fork_server, share_fork_servers
from tests.support.roles import (
    AsyncQueueClient,
    QueueClient,
    as_role,
    refused,
)
from tests.support.servers import Server, embedded_server, in_database, redis_server

# Read when Triton is first imported, be it by a library. With 0 set outside, the kernels' tests use
# the GPU that is there.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Inductor would start processes that compile for a GPU, and each would import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# It would compile six programs to find out whether the compiler knows this processor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# As workers do. More processes than cores would else spin while they wait for their threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Else each of hundreds of processes compiles all of ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

processes.hear_signals()  # for what the product starts
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
    """Returns the URL of a server without roles, like `embedded_url`."""
    yield from redis_server(tmp_path_factory)


@pytest.fixture
def redis_url(embedded_url: str) -> Iterator[str]:
    """An empty embedded server, for a producer; `as_role` makes it another's.

    Afterwards no role may have been refused anything.
    """
    with _emptied(embedded_url):
        yield as_role("producer", embedded_url)


@pytest.fixture
def everything(redis_url: str) -> Iterator[redis.Redis]:
    """The server's default user, who may do anything."""
    with redis.Redis.from_url(as_role("", redis_url)) as client:
        yield client


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[AsyncRequestQueue]:
    client = AsyncQueueClient.from_url(as_role("", redis_url))
    yield AsyncRequestQueue(client)
    await client.aclose()


@pytest.fixture
def own_worker(redis_url: str) -> Iterator[HandWorker]:
    """A worker on the embedded server alone."""
    with QueueClient.from_url(as_role("", redis_url)) as connection:
        yield HandWorker(connection)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Without settings, and without anybody's running `promptq up`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTQ_")}
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


def _role_of(args: tuple[str, ...]) -> str:
    """Returns the role that sends a command."""
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
        env = {**environment, **({"PROMPTQ_REDIS_URL": url} if url else {}), **env}
        return processes.run(*PROMPTQ, *args, stdin=stdin, env=env)

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
def beside() -> Iterator[ThreadPoolExecutor]:
    """Threads beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def fresh_log() -> None:
    """Nothing was logged before, so nothing is left out of the log for that."""
    spoilt._logged_in.cache_clear()
    retry._logged_at.clear()


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
    library_caches.install()
    gc.freeze()
    gc.enable()


@contextmanager
def _emptied(url: str) -> Iterator[None]:
    client = _default_user(url)
    client.flushall()
    client.acl_log_reset()
    yield
    assert refused(client) == []


@cache
def _default_user(url: str) -> redis.Redis:
    """Returns a client for all tests on the server. Two connections for each took four times as
    long as its commands."""
    return redis.Redis.from_url(url)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of matrices, not a sample")
    parser.addoption("--sample-seed", type=int, help="of the sample")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "matrix(cases): the size of a run's sample, or below 1 its share of runs"
    )
    config.addinivalue_line("markers", "long: a run begins with it, so that nothing waits for it")
    if config.option.sample_seed is None:
        given = getattr(config, "workerinput", {"sample_seed": random.randrange(10**6)})
        config.option.sample_seed = given["sample_seed"]


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Let xdist's processes share the fork servers of this one. In a run of all tests, they are
    forks themselves. The tests of a single folder need few of the libraries."""
    folder = tempfile.TemporaryDirectory(prefix="fork-servers-")
    config.add_cleanup(folder.cleanup)
    share_fork_servers(Path(folder.name))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        gateway_io.Popen2IOMaster = _ForkedIO  # type: ignore[misc]


class _ForkedIO(gateway_io.Popen2IOMaster):
    """The pipes to a forked process, in place of those to a new interpreter."""

    def __init__(self, args: list[str], execmodel: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        command = [sys.executable, "-c", args[-1]]
        self.popen = ForkedProcess(command, server=fork_server(TESTS), **pipes)
        gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


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
    if not config.option.whole:
        _take_samples(config, items)
    items[:] = _long_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def _take_samples(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        is_in_matrix = item.get_closest_marker("matrix") is not None
        cases[item.nodeid.partition("[")[0] if is_in_matrix else _on_any_server(item)].append(item)
    left_out = set[pytest.Item]()
    for name, those in cases.items():
        marker = those[0].get_closest_marker("matrix")
        rng = random.Random(f"{config.option.sample_seed} {name}")
        size = 1 if marker is None else marker.args[0]
        chosen = rng.sample(those, min(len(those), int(size + rng.random() * (size < 1))))
        left_out.update(item for item in those if item not in chosen)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def _on_any_server(item: pytest.Item) -> str:
    """Returns the id of a test without the kind of its server."""
    calls: Any = getattr(item, "callspec", None)
    kind = None if calls is None else calls.params.get("server")
    if kind not in SERVERS:
        return item.nodeid
    return re.sub(rf"(?<=[-\[]){kind}(?=[-\]])", "", item.nodeid, count=1)


def _long_ones_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Each of xdist's processes begins with equally many consecutive tests, so each part begins
    with long ones. Those of a file stay together, since some of them start many processes."""
    long_ones, others = defaultdict[str, list[pytest.Item]](list), list[pytest.Item]()
    for item in items:
        is_long = item.get_closest_marker("long") is not None
        (long_ones[item.nodeid.partition("::")[0]] if is_long else others).append(item)
    files, ordered = [*long_ones.values()], list[pytest.Item]()
    for process in range(processes):
        size = (len(items) - len(ordered)) // (processes - process)
        part = [item for file in files[process::processes] for item in file]
        num_others = max(0, size - len(part))
        ordered += part + others[:num_others]
        del others[:num_others]
    return ordered + others


@pytest.fixture
def seed() -> int:
    """Another one each time; that of a failure is printed."""
    chosen = secrets.randbelow(1 << 31)
    print(f"seed {chosen}")
    return chosen
