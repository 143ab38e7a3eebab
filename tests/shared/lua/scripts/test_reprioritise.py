"""A waiting request is given another priority, on every kind of server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from promptq import Client
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Held
from promptq.shared.protocol.replies import PriorityStatus
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, ids, put, put_plainly


@pytest.fixture
def producer(client: Any) -> Iterator[Client]:
    with Client(client) as producer:
        yield producer


def test_it_waits_as_if_it_had_come_with_it(queue: RequestQueue, producer: Client) -> None:
    for name, priority in (("a", 0), ("b", 0), ("c", -2), ("d", 7)):
        put(queue, name, priority=priority)
    assert producer.reprioritise("b", -3) is PriorityStatus.CHANGED
    assert producer.reprioritise("d", 0) is PriorityStatus.CHANGED
    assert producer.reprioritise("c", 1) is PriorityStatus.CHANGED
    assert ids(queue.take_batch(ROOM)) == ["b", "a", "d", "c"]


def test_the_payload_says_so_too_and_keeps_all_else(
    client: Any, queue: RequestQueue, producer: Client
) -> None:
    """Whoever claims it reads there whom it may displace."""
    payload = '{"prompt": "grüß", "seed": 9007199254740993, "stop": [], "temperature": 1e-3}'
    put_plainly(client, queue, "a", 1_700_000_000_000, payload)
    assert producer.reprioritise("a", -4) is PriorityStatus.CHANGED
    (claim,) = queue.take_batch(ROOM)
    assert json.loads(claim.payload) == {**json.loads(payload), "priority": -4}
    assert claim.score == 1_700_000_000_000 - 4 * 60_000
    record = record_of(client, queue, "a")
    assert record[b"priority"] == b"-4"


def record_of(client: Any, queue: RequestQueue, request_id: str) -> dict[bytes, bytes]:
    return dict(client.hgetall(queue.keys.request(request_id)))


def test_strict_priority_and_a_queue_of_a_tenant(
    client: Any, queue: RequestQueue, producer: Client
) -> None:
    client.hset(queue.keys.config, "strict_priority", "1")
    put(queue, "a", tenant="t")
    put(queue, "b", tenant="t")
    before = client.zscore(queue.keys.pending_of("t"), "b")
    assert producer.reprioritise("b", -1) is PriorityStatus.CHANGED
    assert client.zscore(queue.keys.pending_of("t"), "b") == before - 2**41
    assert ids(queue.take_batch(ROOM)) == ["b", "a"]


def test_a_delayed_request_takes_its_new_place_when_its_time_comes(
    client: Any, queue: RequestQueue, producer: Client
) -> None:
    put(queue, "a", delay_ms=60_000)
    put(queue, "b", priority=-1)
    assert producer.reprioritise("a", -3) is PriorityStatus.CHANGED
    assert client.zcard(queue.keys.delayed) == 1
    client.zadd(queue.keys.delayed, {"a": 1})
    assert ids(queue.take_batch(ROOM)) == ["a", "b"]


def test_what_does_not_wait_stays_as_it_is(queue: RequestQueue, producer: Client) -> None:
    put(queue, "held")
    (claim,) = queue.take_batch(ROOM)
    put(queue, "over")
    queue.cancel("over")
    assert producer.reprioritise("held", -3) is PriorityStatus.ACTIVE
    assert producer.reprioritise("over", -3) is PriorityStatus.FINISHED
    assert producer.reprioritise("nobody", -3) is PriorityStatus.UNKNOWN
    queue.release([Held("held", claim.fence)])
    assert queue.take_batch(ROOM)[0].score == claim.score
    assert queue.count() == 0


def test_two_at_once_both_count(client: Any, queue: RequestQueue, producer: Client) -> None:
    """Whoever read the payload before another changed it is told so, and changes nothing."""
    put(queue, "a", priority=5)
    old = client.hget(queue.keys.request("a"), "payload")
    assert producer.reprioritise("a", 2) is PriorityStatus.CHANGED
    late = queue.run(scripts.reprioritise("a", 9, old, '{"prompt":"a","priority":9}'))
    assert late is PriorityStatus.STALE
    assert json.loads(queue.take_batch(ROOM)[0].payload)["priority"] == 2


def test_workers_with_room_hear_of_it(client: Any, queue: RequestQueue, producer: Client) -> None:
    put(queue, "a")
    with client.pubsub() as channel:
        channel.subscribe(queue.keys.control)
        messages = channel.listen()
        assert next(messages)["type"] == "subscribe"
        producer.reprioritise("a", -1)
        assert next(messages)["data"] == b"pending"


def test_wrong_priorities_and_payloads_are_refused(
    client: Any, queue: RequestQueue, producer: Client
) -> None:
    put_plainly(client, queue, "a", 5, "[1]")
    with pytest.raises(InvalidRequestError, match="payload"):
        producer.reprioritise("a", 1)
    with pytest.raises(InvalidRequestError, match="priority: 1001"):
        producer.reprioritise("a", 1001)
    assert client.zscore(queue.keys.pending, "a") == 5
