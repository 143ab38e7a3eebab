"""A server without memory left takes in no request; what it accepted goes on to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import OutOfMemoryError

from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, entries_of, held, ids, last_event, new, put, row
from tests.support.roles import QueueClient
from tests.support.servers import embedded_server, redis_server

Snapshot = dict[bytes, Any]


@pytest.fixture(scope="module")
def own_redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose memory nobody else's tests need."""
    yield from redis_server(tmp_path_factory)


@pytest.fixture(scope="module")
def own_embedded_server() -> Iterator[str]:
    with embedded_server() as url:
        yield url


@pytest.fixture(params=["own_embedded_server", "own_redis_server"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    with QueueClient.from_url(request.getfixturevalue(request.param)) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        yield client
        client.config_set("maxmemory", 0)


def run_out(client: Any) -> None:
    client.config_set("maxmemory", 1)


def recover(client: Any) -> None:
    client.config_set("maxmemory", 0)


def snapshot(client: Any) -> Snapshot:
    return {key: client.dump(key) for key in client.keys("*")}


def refused_whole(client: Any, action: Callable[[], object]) -> None:
    before = snapshot(client)
    run_out(client)
    with pytest.raises(OutOfMemoryError):
        action()
    recover(client)
    assert snapshot(client) == before


def two_running(queue: RequestQueue) -> tuple[Claim, Claim]:
    put(queue, "a")
    put(queue, "b")
    a, b = queue.take_batch(ROOM)
    queue.publish([row(a, 0), row(b, 0)])
    return a, b


def test_streams_go_on_to_their_end(client: Any, queue: RequestQueue) -> None:
    a, b = two_running(queue)
    queue.cancel("a")
    run_out(client)
    rows = [row(a, 1), row(b, 1, reason=FinishReason.STOP)]
    assert queue.publish(rows, [held(b)]).rows == ["cancelled", "ok"]
    recover(client)
    assert [at for at, _ in entries_of(client, queue, "b")] == ["1-0", "2-1"]
    assert queue.state("b") is RequestState.COMPLETED


def test_nothing_more_is_taken_in_and_what_waits_is_handed_out(
    client: Any, queue: RequestQueue
) -> None:
    """Otherwise waiting requests that fill the memory would stay there for ever."""
    put(queue, "a")
    refused_whole(client, lambda: queue.enqueue([new("b"), new("c")]))
    run_out(client)
    assert ids(queue.take_batch(ROOM)) == ["a"]
    recover(client)
    put(queue, "b")
    assert ids(queue.take_batch(ROOM)) == ["b"]


def test_a_paused_queue_can_be_resumed(client: Any, queue: RequestQueue) -> None:
    """Otherwise waiting requests that fill the memory would stay there for ever."""
    put(queue, "a")
    queue.run(scripts.set_paused(queue.keys, True))
    run_out(client)
    assert queue.take_batch(ROOM) == []
    queue.run(scripts.set_paused(queue.keys, False))
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_a_request_can_still_change_its_place(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    payload = client.hget(queue.keys.request("a"), "payload")
    run_out(client)
    call = scripts.reprioritise("a", -3, payload, '{"prompt":"hello","priority":-3}')
    assert queue.run(call) == "changed"


def test_held_requests_are_kept_and_still_given_back(client: Any, queue: RequestQueue) -> None:
    """Else leases would run out, and that would count as a crash."""
    a, b = two_running(queue)
    client.zadd(queue.keys.leases, {"a": 1})
    run_out(client)
    assert queue.publish([], [held(a), held(b)]).held == ["ok", "ok"]
    assert client.zscore(queue.keys.leases, "a") > 1
    assert queue.reap().returned == 0
    assert queue.release([held(a)]) == ["waiting"]
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="w1"), 5000)) == 1
    assert queue.run(scripts.hold(queue.keys, queue.keys.jobs_leader, "me", 5000))
    recover(client)
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_what_is_cancelled_ends_whole(client: Any, queue: RequestQueue) -> None:
    a, _ = two_running(queue)
    put(queue, "waits")
    run_out(client)
    assert queue.cancel("waits") is CancelStatus.CANCELLED
    assert queue.cancel("a") is CancelStatus.FLAGGED
    assert queue.publish([], [held(a)]).held == ["cancelled"]
    for name in ("waits", "a"):
        assert queue.state(name) is RequestState.CANCELLED
        assert last_event(queue, name)["finish_reason"] == "cancelled"
    assert client.zrange(queue.keys.leases, 0, -1) == [b"b"]


def test_a_crash_is_accounted_whole(client: Any, queue: RequestQueue) -> None:
    two_running(queue)
    client.zadd(queue.keys.leases, {"a": 1})
    run_out(client)
    assert queue.reap().returned == 1
    recover(client)
    record = queue.run(lookups.record(queue.keys, "a"))
    assert (record["state"], record["crashes"]) == ("waiting", "1")
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_a_replica_refuses_every_script_whole(client: Any, queue: RequestQueue) -> None:
    a, b = two_running(queue)
    before = snapshot(client)
    client.config_set("replica-serve-stale-data", "yes")
    client.replicaof("127.0.0.1", 1)
    try:
        for action in (
            lambda: queue.publish([row(a, 1), row(b, 1, reason=FinishReason.STOP)]),
            lambda: queue.publish([], [held(a)]),
            lambda: queue.release([held(a)]),
            lambda: queue.cancel("a"),
            lambda: queue.take_batch(ROOM),
            queue.reap,
        ):
            with pytest.raises(redis.exceptions.ReadOnlyError):
                action()
        assert snapshot(client) == before
    finally:
        client.replicaof("NO", "ONE")
