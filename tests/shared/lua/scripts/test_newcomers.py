"""A full worker gets requests of tenants of which it holds nothing, if others have more."""

from __future__ import annotations

from typing import Any

import pytest

from promptq.shared.protocol.claims import Holding, Room
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ids, put


def full(*held: Holding, max_count: int = 0, token_budget: int = 0) -> Room:
    """A worker without room."""
    preemptible = [
        (it.priority, it.tokens // it.num_running) for it in held for _ in range(it.num_running)
    ]
    return Room(max_count, token_budget, preemptible=preemptible, held=held, num_held=9)


MANY = Holding(0, 8, 8000, "many")


@pytest.fixture
def queue(client: Any) -> RequestQueue:
    """In it, the tenant that holds the worker waits first."""
    queue = RequestQueue(client)
    for n in range(3):
        put(queue, f"many{n}", tenant="many", max_tokens=10)
    return queue


def test_one_request_of_each_tenant_gets_in(queue: RequestQueue) -> None:
    assert queue.take_batch(full(MANY)) == []
    for n in range(2):
        put(queue, f"few{n}", tenant="few", max_tokens=10)
        put(queue, f"other{n}", tenant="other", max_tokens=10)
        put(queue, f"u{n}", max_tokens=10)
    assert sorted(ids(queue.take_batch(full(MANY)))) == ["few0", "other0", "u0"]
    others = [Holding(0, 0, 0, tenant) for tenant in ("few", "other", "")]
    assert queue.take_batch(full(MANY, *others)) == [], "it holds something of all of them"


def test_it_gets_in_beside_those_for_which_there_is_room(queue: RequestQueue) -> None:
    put(queue, "few", tenant="few", max_tokens=10)
    room = full(MANY, max_count=1, token_budget=100)
    assert len(queue.take_batch(room)) == 2
    assert queue.state("few") == "active"


def test_it_gets_in_however_much_it_was_served_before(client: Any, queue: RequestQueue) -> None:
    put(queue, "few", tenant="few", max_tokens=10)
    client.zadd(f"{queue.keys.prefix}tenants", {"few": 10**6, "many": 1, "*": 0})
    assert ids(queue.take_batch(full(MANY))) == ["few"]
    assert client.zscore(f"{queue.keys.prefix}tenants", "many") == 1, "it still waits"


def test_a_worker_that_says_nothing_of_tenants_gets_none(queue: RequestQueue) -> None:
    put(queue, "few", tenant="few", max_tokens=10)
    assert queue.take_batch(Room(0, 0, preemptible=[(0, 1000)] * 8)) == []


@pytest.mark.parametrize("holding", [Holding(0, 1, 8000, "many"), Holding(-1, 8, 8000, "many")])
def test_nobody_gets_below_its_share_or_makes_room_for_less(
    queue: RequestQueue, holding: Holding
) -> None:
    put(queue, "few", tenant="few", max_tokens=10)
    assert queue.take_batch(full(holding)) == []


def test_a_request_that_is_larger_than_the_share_waits(queue: RequestQueue) -> None:
    put(queue, "large", tenant="few", max_tokens=250, prompt="x" * 16_000)
    assert queue.take_batch(full(MANY)) == []
    put(queue, "smaller", tenant="other", max_tokens=250, prompt="x" * 14_000)
    assert ids(queue.take_batch(full(MANY))) == ["smaller"]


def test_weights_say_what_is_more(client: Any, queue: RequestQueue) -> None:
    """Beside 8 of a tenant of weight 8, one of weight 1 has a share of less than one."""
    put(queue, "few", tenant="few", max_tokens=10)
    client.hset(queue.keys.config, "weight:many", 8)
    assert queue.take_batch(full(MANY)) == []
    client.hset(queue.keys.config, "weight:many", 7)
    (claim,) = queue.take_batch(full(MANY))
    assert (claim.request_id, claim.weight) == ("few", 1)


def test_a_large_request_of_another_that_waits_for_room_holds_it_up_no_more(
    queue: RequestQueue,
) -> None:
    put(queue, "large", tenant="many", max_tokens=250, prompt="x" * 40_000, priority=-1)
    room = full(MANY, max_count=1, token_budget=100)
    for n in range(9):
        put(queue, f"overtaking{n}", tenant="many", max_tokens=10)
        assert queue.take_batch(room) if n < 8 else not queue.take_batch(room)
    put(queue, "few", tenant="few", max_tokens=10)
    assert ids(queue.take_batch(room)) == ["few"]


def test_a_suspect_keeps_the_worker_for_itself(client: Any, queue: RequestQueue) -> None:
    """Also from newcomers, or it would never be empty."""
    put(queue, "suspect", tenant="bad", max_tokens=10, priority=-5)
    client.hset(queue.keys.request("suspect"), mapping={"suspect": 1, "passed": 8})
    put(queue, "few", tenant="few", max_tokens=10)
    assert queue.take_batch(full(MANY)) == []
