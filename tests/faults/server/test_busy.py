"""A server that runs a script without end is waited for, like one that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import redis
import redis.asyncio

from promptq import AsyncClient, Client
from promptq.shared.errors import PromptqError, RedisBusyError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.server.connection import explain, open_redis
from promptq.shared.server.retry import is_away
from tests.producer.gateway.living import live_gateway, live_worker
from tests.support.model_free import served_model_free
from tests.support.roles import as_role
from tests.support.servers import OwnServer
from tests.support.waiting import until

ENDLESS = "while true do end"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    """A server that replies BUSY after 10 ms of a script."""
    with OwnServer(tmp_path, "--lua-time-limit", "10") as server:
        yield server


def run_endless(server: OwnServer) -> None:
    with server.client() as client, pytest.raises(redis.ResponseError, match="kill"):
        client.execute_command("EVAL", ENDLESS, 0)


def is_busy(client: redis.Redis) -> bool:
    try:
        return not client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)


@contextmanager
def busy(server: OwnServer) -> Iterator[None]:
    """The server runs a script until the end of the block."""
    with ThreadPoolExecutor() as pool, server.client() as client:
        running = pool.submit(run_endless, server)
        until(lambda: is_busy(client))
        yield
        assert is_busy(client)
        client.script_kill()
        running.result()


def test_streams_calls_and_workers_go_on(server: OwnServer) -> None:
    begun: set[int] = set()

    def num_tokens(client: Client | AsyncClient, event: TokenEvent) -> int:
        begun.add(id(client))
        return len(event.token_ids)

    def read(client: Client) -> int:
        return sum(num_tokens(client, event) for event in client.stream(request_id))

    async def read_async(client: AsyncClient) -> int:
        async with client:
            return sum([num_tokens(client, event) async for event in client.stream(request_id)])

    plain = as_role("producer", server.url)
    with (
        live_worker(as_role("worker", server.url), served_model_free(step_seconds=0.005)),
        live_gateway(as_role("gateway", server.url)) as gateway,
        Client(plain) as own,
        redis.Redis.from_url(plain) as connection,
        Client(connection) as of_connection,
        ThreadPoolExecutor() as pool,
    ):
        request_id = own.enqueue("Hi", max_tokens=300)
        streams: list[Future[int]] = [pool.submit(read, it) for it in (own, of_connection)]
        clients = AsyncClient(plain), AsyncClient(redis.asyncio.Redis.from_url(plain))
        streams += [pool.submit(asyncio.run, read_async(it)) for it in clients]
        until(lambda: len(begun) == len(streams))
        with busy(server):
            enqueueing = pool.submit(own.enqueue, "Hi", max_tokens=8)
            connecting = pool.submit(_open_when_served, plain)
            answer = httpx2.get(f"{gateway.url}/v1/models", timeout=30)
            assert answer.json()["error"]["code"] == "queue_unavailable"
            assert not enqueueing.done()
        assert [it.result() for it in streams] == [300] * 4
        assert own.result(enqueueing.result()).usage.completion_tokens == 8
        assert connecting.result() > 0
        assert httpx2.get(f"{gateway.url}/v1/models", timeout=None).status_code == 200


def _open_when_served(url: str) -> int:
    """How often the server was busy before it could be opened."""
    count = 0
    while True:
        try:
            open_redis(url).close()
        except RedisBusyError:
            count += 1
        else:
            return count


@pytest.mark.parametrize(
    ("reply", "is_waited_for", "said"),
    [
        ("BUSY Redis is busy running a script.", True, "cannot serve yet"),
        ("LOADING Redis is loading the dataset in memory", True, "cannot serve yet"),
        ("MASTERDOWN Link with MASTER is down", True, "cannot serve yet"),
        ("CLUSTERDOWN The cluster is down", True, "cannot serve yet"),
        ("TRYAGAIN Multiple keys request during rehashing", True, "cannot serve yet"),
        ("OOM command not allowed when used memory > 'maxmemory'.", False, "memory .* is full"),
        ("MISCONF Errors writing to the AOF file", False, "refuses a command: MISCONF"),
        ("NOREPLICAS Not enough good replicas to write.", False, "refuses a command: NOREPLICAS"),
        ("READONLY You can't write against a read only replica.", False, "refuses a command"),
        ("NOREPLICAS Not enough. script: 6d8b, on @user_script:107.", False, r"Not enough\.$"),
        ("BUSYGROUP Consumer Group name already exists", False, "refuses a command: BUSYGROUP"),
    ],
)
def test_what_a_stream_waits_for(reply: str, is_waited_for: bool, said: str) -> None:
    error = redis.connection.DefaultParser.parse_error(reply)
    assert is_away(error) is is_waited_for
    with pytest.raises(PromptqError, match=said):
        raise explain(error, "redis://host")
