"""Requests with `durability: replicated`: enqueueing waits until the replicas have them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from promptq import AsyncClient, Client
from promptq.shared.errors import InvalidRequestError, NotReplicatedError, RequestExistsError
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue import scripts
from tests.faults.sentinels import guarded_by_three
from tests.support.roles import as_role
from tests.support.servers import PROGRAMS, OwnServer
from tests.support.waiting import until

DURABLE: dict[str, Any] = {"durability": "replicated"}
_SHORT = "?socket_timeout=2"  # then a call waits 1 s for replicas


class Replicated:
    """A primary and its replicas. `url` is for producers."""

    def __init__(self, primary: OwnServer, replicas: list[OwnServer]) -> None:
        self.primary, self.replicas = primary, replicas
        self.url = primary.url + _SHORT

    def flush_scripts(self) -> None:
        with self.primary.client() as client:
            client.script_flush()


@pytest.fixture
def num_replicas() -> int:
    """A test may have a parameter of this name instead."""
    return 1


@pytest.fixture(params=PROGRAMS)
def servers(
    request: pytest.FixtureRequest, tmp_path: Path, num_replicas: int
) -> Iterator[Replicated]:
    kind = request.param
    with ExitStack() as stack:
        primary = stack.enter_context(OwnServer(tmp_path / "primary", kind=kind))
        options = ("--replicaof", f"127.0.0.1 {primary.port}")
        replicas = [
            stack.enter_context(OwnServer(tmp_path / f"replica{nth}", *options, kind=kind))
            for nth in range(num_replicas)
        ]
        for replica in replicas:
            client = stack.enter_context(replica.client())
            until(lambda client=client: client.info("replication")["master_link_status"] == "up")
        yield Replicated(primary, replicas)


def acknowledged(client: Client, **fields: Any) -> str:
    """Repeats a call until the replicas have the request. Returns the id."""
    while True:
        try:
            return client.enqueue("Hi", **fields, **DURABLE)
        except NotReplicatedError:
            continue  # the machine is busy


async def test_a_request_counts_as_enqueued_when_the_replica_has_it(servers: Replicated) -> None:
    with Client(servers.url) as client:
        request_id = acknowledged(client)
        assert client.state(request_id) == "waiting"
        with servers.replicas[0].client() as replica:
            assert replica.exists(client.queue.keys.request(request_id))
    async with AsyncClient(servers.url) as client:
        ids = await client.enqueue_many([{"prompt": "a", **DURABLE}, {"prompt": "b"}])
        with servers.replicas[0].client() as replica:
            assert replica.exists(*map(client.queue.keys.request, ids)) == 2


@pytest.mark.parametrize("has_key", [False, True])
def test_a_silent_replica_is_an_error_also_when_the_call_is_repeated(
    servers: Replicated, has_key: bool
) -> None:
    """A repeated call writes nothing new, yet it must not count the replica before the replica has
    the first call. Its connection may be new."""
    fields = {"idempotency_key": "k"} if has_key else {"request_id": "mine"}
    said = r"^the request '.*' is written, but acknowledged by 0 of 1 replica within 1 s; repeating"
    with Client(servers.url) as client, Client(servers.url) as other:
        servers.replicas[0].freeze()
        for each in (client, client, other):
            with pytest.raises(NotReplicatedError, match=said) as raised:
                each.enqueue("Hi", **fields, **DURABLE)
            assert client.state(raised.value.request_ids[0]) == "waiting"
        servers.replicas[0].thaw()
        assert [acknowledged(other, **fields)] == raised.value.request_ids
        assert client.stats().waiting == 1


async def test_asyncio_raises_too_and_other_calls_run_meanwhile(servers: Replicated) -> None:
    async with AsyncClient(servers.url) as client:
        servers.replicas[0].freeze()
        calls = [{"prompt": "Hi", **DURABLE}] * 100
        waiting = [asyncio.create_task(client.enqueue_many([call])) for call in calls]
        while (await client.stats()).waiting == 0:
            pass
        request_id = await client.enqueue("Hi")
        assert await client.state(request_id) == "waiting"
        assert not any(task.done() for task in waiting[-50:])
        with pytest.raises(NotReplicatedError):
            await waiting[0]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("num_replicas", [2])
def test_all_replicas_must_have_a_request(servers: Replicated) -> None:
    """A failover may promote any of them."""
    with Client(servers.url) as client:
        servers.replicas[1].freeze()
        with pytest.raises(NotReplicatedError, match="by 1 of 2 replicas within"):
            client.enqueue("Hi", request_id="a", **DURABLE)
        servers.replicas[1].thaw()
        assert acknowledged(client, request_id="a") == "a"


@pytest.mark.parametrize("num_replicas", [0])
def test_a_server_without_a_replica_cannot_promise_it(servers: Replicated) -> None:
    with Client(servers.url) as client:
        with pytest.raises(NotReplicatedError, match="but the server has no replica; rep"):
            client.enqueue("Hi", **DURABLE)
        calls = [{"prompt": "Hi", "request_id": name} for name in "abc"]
        with pytest.raises(NotReplicatedError, match=r"^the request 'a' and 2 more are") as raised:
            client.enqueue_many([*calls[:2], {**calls[2], **DURABLE}])
        assert raised.value.request_ids == ["a", "b", "c"]
        assert client.stats().waiting == 4


def test_a_server_that_forgot_the_script_still_waits(servers: Replicated) -> None:
    with Client(servers.url) as client:
        for _ in range(2):
            acknowledged(client)
        servers.flush_scripts()
        servers.replicas[0].freeze()
        with pytest.raises(NotReplicatedError):
            client.enqueue("Hi", **DURABLE)


@pytest.mark.parametrize("num_replicas", [0])
def test_only_an_equal_request_repeats_an_id(servers: Replicated) -> None:
    with Client(servers.url) as client:
        with pytest.raises(NotReplicatedError):
            client.enqueue("Hi", request_id="a", **DURABLE)
        for wrong in ({"prompt": "Ho", **DURABLE}, {"prompt": "Hi"}):
            with pytest.raises(RequestExistsError):
                client.enqueue(request_id="a", **wrong)
        with pytest.raises(InvalidRequestError, match=r"^durability: must be 'replicated' or left"):
            client.enqueue("Hi", durability="always")


def test_a_call_is_repeated_after_a_lost_connection(servers: Replicated) -> None:
    with (
        Client(f"{servers.primary.url}?socket_timeout=600") as client,
        servers.primary.client() as other,
        ThreadPoolExecutor() as pool,
    ):
        servers.replicas[0].freeze()
        waiting = pool.submit(client.enqueue, "Hi", request_id="a", **DURABLE)
        until(lambda: other.info("clients")["blocked_clients"] == 1)
        assert other.execute_command("CLIENT", "KILL", "USER", "producer") > 0
        until(lambda: other.info("clients")["blocked_clients"] == 1)
        assert not waiting.done()
        servers.replicas[0].thaw()
        assert waiting.result() == "a"
        assert client.stats().waiting == 1


def test_every_role_that_enqueues_may_wait(servers: Replicated) -> None:
    for role in ("producer", "gateway", "jobs", "operator"):
        url = as_role(role, servers.url)
        with Client(url) as client:
            assert acknowledged(client, request_id=role) == role


def test_the_master_of_sentinels_waits(tmp_path: Path) -> None:
    with guarded_by_three(tmp_path) as guarded, Client(guarded.url + _SHORT) as client:
        assert acknowledged(client, request_id="a") == "a"
        guarded.replica.freeze()
        with pytest.raises(NotReplicatedError, match="by 0 of 1 replica"):
            client.enqueue("Hi", request_id="b", **DURABLE)
        guarded.replica.thaw()


def test_a_call_that_waits_shares_no_round_trip(redis_url: str) -> None:
    """Its WAIT would count other writes."""
    new = NewRequest("a", Request.build({"prompt": "Hi"}), durability="replicated")
    with Client(redis_url) as client:
        with pytest.raises(ValueError, match="waits for replicas must be sent alone"):
            client.queue.run([scripts.enqueue([new], 1000)])
        assert client.state("a") is None
