"""Tenants share what is served: the order of their requests, and what plain clients do."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import NewRequest, Request, RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import put
from tests.support.servers import Server

# --- order


def put_for(queue: RequestQueue, request_id: str, tenant: str | None = None, **fields: Any) -> str:
    return put(
        queue, request_id, **{"prompt": "hello", "max_tokens": 4, "tenant": tenant, **fields}
    )


def taken(queue: RequestQueue, count: int = 1000) -> list[str]:
    return [claim.request_id for claim in queue.take_batch(Room(count, 10**9))]


def test_a_burst_in_one_claim_is_spread_over_tenants(queue: RequestQueue) -> None:
    for n in range(6):
        put_for(queue, f"a{n}", "a")
    for n in range(3):
        put_for(queue, f"b{n}", "b")
    put_for(queue, "plain")
    first = taken(queue, 6)
    assert Counter(request_id[0] for request_id in first) == {"a": 3, "b": 2, "p": 1}
    assert [request_id for request_id in first if request_id[0] == "a"] == ["a0", "a1", "a2"]


def test_claims_of_a_turn_keep_their_order_on_the_way_to_the_engine(queue: RequestQueue) -> None:
    for n in range(4):
        put_for(queue, f"a{n}", "a")
    put_for(queue, "b0", "b")
    claims = queue.take_batch(Room(5, 10**9))
    assert sorted(claims, key=lambda claim: claim.order) == list(claims)
    assert [claim.request_id for claim in claims].index("b0") == 1


def test_priority_goes_before_the_share_and_within_it_each_has_its_own(queue: RequestQueue) -> None:
    for n in range(3):
        put_for(queue, f"a{n}", "a", priority=-1)
        put_for(queue, f"b{n}", "b")
        put_for(queue, f"c{n}", "c")
    order = taken(queue)
    assert order[:3] == ["a0", "a1", "a2"]
    assert Counter(request_id[0] for request_id in order[3:5]) == {"b": 1, "c": 1}
    for n in range(
        3
    ):  # what a got at -1 is not held against it at 0, nor b's at 0 against it at -1
        put_for(queue, f"a-at-0-{n}", "a")
        put_for(queue, f"b-at-0-{n}", "b")
    assert Counter(request_id[0] for request_id in taken(queue, 4)) == {"a": 2, "b": 2}


def test_what_is_served_at_one_priority_sets_no_clock_at_another(queue: RequestQueue) -> None:
    for n in range(9):
        put_for(queue, f"l{n}", "long-here")
    assert taken(queue, 1) == ["l0"]
    for n in range(30):
        put_for(queue, f"urgent{n}", "urgent", priority=-1, prompt="x" * 400)
        assert taken(queue, 1) == [f"urgent{n}"]
    for n in range(9):
        put_for(queue, f"n{n}", "new-here")
    assert Counter(request_id[0] for request_id in taken(queue, 6)) == {"l": 3, "n": 3}


def test_those_without_a_name_pay_also_while_no_tenant_waits(queue: RequestQueue) -> None:
    for n in range(50):
        put_for(queue, f"plain{n:02}")
    put_for(queue, "t1", "team", prompt="x" * 100)
    assert "t1" in taken(queue, 2)
    assert all(request_id.startswith("plain") for request_id in taken(queue, 20))
    put_for(queue, "t2", "team")
    assert taken(queue, 1) == ["t2"]


def test_a_large_head_of_one_tenant_is_overtaken_only_so_often(queue: RequestQueue) -> None:
    put_for(queue, "large", "a", max_tokens=200)
    for n in range(20):
        put_for(queue, f"small{n:02}", "ab"[n % 2])
    room = Room(max_count=1, token_budget=50)
    overtaking = []
    while claims := queue.take_batch(room):
        overtaking += [claim.request_id for claim in claims]
    of_its_tenant = [request_id for request_id in overtaking if int(request_id[5:]) % 2 == 0]
    assert len(of_its_tenant) <= 8, "what goes to others in their turn overtakes nobody"
    assert len(overtaking) < 20, "then room is kept for it"
    assert [claim.request_id for claim in queue.take_batch(Room(1, 300))] == ["large"]


def test_one_claim_looks_at_a_bounded_number_of_all_tenants(queue: RequestQueue) -> None:
    for n in range(600):
        put_for(queue, f"{n:03}", "abc"[n % 3])
        queue.redis.hset(queue.keys.request(f"{n:03}"), "cancelled", "1")
    put_for(queue, "good", "c")
    assert taken(queue) == []
    assert queue.count() == 601 - 512
    assert taken(queue) == ["good"]


# --- plain clients, and what strangers do


def test_a_plain_client_can_use_a_tenants_queue(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.request("r"), "payload", '{"prompt":"a","max_tokens":1}')
    client.zadd(queue.keys.pending + ":team.1", {"r": 1})
    client.sadd(queue.keys.tenants_waiting, "team.1")
    assert queue.count() == 1
    assert queue.contains("r")
    (claim,) = queue.take_batch(Room(1, 1000))
    assert queue.release([Held(claim.request_id, claim.fence)]) == ["waiting"]
    assert client.zscore(queue.keys.pending + ":team.1", "r") == 1
    assert taken(queue) == ["r"]


def test_names_that_no_key_should_hold_are_forgotten(client: Any, queue: RequestQueue) -> None:
    names = ["a b", "*", "x:y", "}{", "n" * 65, b"\xff", "../leases"]
    client.sadd(queue.keys.tenants_waiting, *names)
    client.set(queue.keys.pending_of("text"), "of another type")
    client.sadd(queue.keys.tenants_waiting, "text")
    client.hset(queue.keys.request("bad"), mapping={"payload": '{"prompt":"a"}', "tenant": "x:y"})
    client.zadd(queue.keys.pending, {"bad": 1})
    put_for(queue, "good", "team")
    assert queue.count() == 2
    client.zadd(queue.keys.pending + ":a b", {"hidden": 1})
    assert sorted(taken(queue)) == ["bad", "good"]
    assert client.zscore(queue.keys.pending + ":a b", "hidden") == 1
    assert client.smembers(queue.keys.tenants_waiting) <= {b"", b"text"}


def test_a_weight_without_sense_counts_as_one(client: Any, queue: RequestQueue) -> None:
    for n, weight in enumerate(["abc", "nan", "inf", "0", "-1", ""]):
        client.hset(queue.keys.config, f"weight:t{n}", weight)
    for n in range(12):
        put_for(queue, f"{n:02}", f"t{n % 6}")
    first = taken(queue, 6)
    assert sorted(int(request_id) % 6 for request_id in first) == list(range(6))


def test_an_id_in_the_queues_of_two_tenants_runs_once(client: Any, queue: RequestQueue) -> None:
    put_for(queue, "r", "a")
    put_for(queue, "other", "b")
    client.zadd(queue.keys.pending_of("b"), {"r": 1})
    client.zadd(queue.keys.pending, {"r": 1})
    assert sorted(taken(queue)) == ["other", "r"]
    assert queue.is_empty()
    put_for(queue, "over", "a")
    client.zadd(queue.keys.pending_of("b"), {"over": 1})
    client.sadd(queue.keys.tenants_waiting, "b")
    queue.cancel("over")
    assert taken(queue) == []
    assert queue.is_empty()


# --- all that moves ids knows the tenant's queue


def test_whatever_puts_back_uses_the_tenants_own_queue(client: Any, server: Server) -> None:
    queue = RequestQueue(client, lease_ms=1, max_crashes=2)
    own = queue.keys.pending_of("team")
    put_for(queue, "r", "team")
    assert client.zcard(own) == 1
    assert client.zcard(queue.keys.pending) == 0
    (claim,) = queue.take_batch(Room(1, 1000))
    assert client.zcard(own) == 0
    assert queue.release([Held("r", claim.fence)]) == ["waiting"]
    assert client.zcard(own) == 1
    queue.take_batch(Room(1, 1000))
    time.sleep(0.01)
    assert queue.reap().returned == 1
    assert client.zcard(own) == 1
    request = Request.build({"prompt": "a", "tenant": "team"})
    queue.enqueue([NewRequest("later", request, delay_ms=1)])
    time.sleep(0.01)
    assert queue.reap().returned == 1
    assert client.zcard(own) == 2
    assert queue.run(lookups.waiting_ids(queue.keys, 10)) == ["r", "later"]
    assert queue.cancel("later") is CancelStatus.CANCELLED
    assert client.zcard(own) == 1
    put_for(queue, "expires", "team", deadline_ms=1)
    time.sleep(0.01)
    assert queue.reap().ended == 1
    assert queue.state("expires") is RequestState.EXPIRED
    assert client.zcard(own) == 1


def test_a_dead_letter_goes_back_to_its_tenant(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=1, max_crashes=1)
    put_for(queue, "r", "team")
    for num_dead in (0, 1):  # with others, and then alone
        assert taken(queue) == ["r"]
        time.sleep(0.01)
        assert queue.reap().dead == num_dead
    new_id = queue.requeue("r")
    assert client.zrange(queue.keys.pending_of("team"), 0, -1) == [new_id.encode()]
    assert taken(queue) == [new_id]


def test_clear_removes_what_waits_of_every_tenant(client: Any, queue: RequestQueue) -> None:
    for n in range(5):
        put_for(queue, f"a{n}", "a")
        put_for(queue, f"{n}")
    client.zadd(queue.keys.pending_of("stranger"), {"no-hash": 1})
    client.sadd(queue.keys.tenants_waiting, "stranger")
    client.hset(queue.keys.request("plain"), "payload", '{"prompt":"a"}')
    client.zadd(queue.keys.pending_of("stranger"), {"plain": 1})
    assert queue.clear() >= 11
    assert queue.is_empty()
    assert queue.state("plain") is RequestState.CANCELLED
