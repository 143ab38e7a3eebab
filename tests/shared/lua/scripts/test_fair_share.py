"""Tenants share what is served: in proportion to their weights, within a bound, wasting nothing.

The bound is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), theorem
4.4: two tenants that have something waiting all the time differ in what they get by at most twice
the larger of a prompt's service and that of a full batch's output. There is also its bound on how
long the request of another tenant is delayed.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, NewRequest, Request, RequestState
from promptq.shared.protocol.rows import Row
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from tests.shared.lua.scripts.fair_world import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairBound, World
from tests.support.requests import put
from tests.support.roles import QueueClient, as_role
from tests.support.servers import Server

LARGEST_PROMPT, LARGEST_OUTPUT = 40, 20
ROOM = 5 * (LARGEST_PROMPT + LARGEST_OUTPUT)
LONGEST_ESTIMATE = 60
"""The scripts' estimate for the longest prompt before it is tokenised: a quarter of its payload."""


@pytest.fixture
def world(redis_url: str) -> Iterator[World]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with QueueClient.from_url(as_role("", redis_url)) as client:
        largest = (LARGEST_PROMPT, LARGEST_OUTPUT)
        yield World(client, random.Random(seed), room=ROOM, largest=largest)


def bound_of(weights: list[float]) -> float:
    largest = max(PROMPT_WEIGHT * LONGEST_ESTIMATE, OUTPUT_WEIGHT * ROOM)
    return 2 * largest / min(weights)


# --- the bound


@pytest.mark.matrix(2)
@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 2, 1, 5]], ids=["equal", "weighted"])
@pytest.mark.parametrize("priority", [0, -3])
def test_no_tenant_is_served_beyond_the_bound(
    world: World, weights: list[float], priority: int
) -> None:
    """Floods, pauses and returns of four tenants, large and small requests, hand-backs."""
    rng = world.rng
    tenants = ["", "large", "small", "plain"]
    outputs = {"": (1, 20), "large": (15, 20), "small": (1, 2), "plain": (1, 20)}
    prompts = {"": (1, 40), "large": (1, 3), "small": (1, 40), "plain": (1, 40)}
    world.priority = priority
    for tenant, weight in zip(tenants, weights, strict=True):
        world.set_weight(tenant, weight)
    bound = FairBound(world, bound_of(weights))
    is_active = dict.fromkeys(tenants, True)
    for step in range(1500):
        for tenant in tenants:
            if rng.random() < 0.004:
                is_active[tenant] = not is_active[tenant]
            while is_active[tenant] and world.waiting[tenant] < 12:
                length, output = rng.randint(*prompts[tenant]), rng.randint(*outputs[tenant])
                world.put(tenant, length, output, plainly=tenant in ("", "plain"))
        bound.assert_holds()
        world.claim()
        bound.assert_holds()
        world.step()
        bound.assert_holds()
        if step % 50 == 7:
            world.hand_back()
            bound.assert_holds()
    print(f"worst {bound.worst:.0f} of {bound.most:.0f}, {dict(world.service)}")


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 2, 1, 5]], ids=["equal", "weighted"])
def test_floods_delay_another_tenant_by_no_more_than_the_bound(
    world: World, weights: list[float]
) -> None:
    """The paper's bound on the delay, in service: where n tenants wait, the n - 1 others get at
    most 2 (n - 1) U between a request of a tenant with nothing waiting or running and its dispatch.
    U is half the bound on service; divided by the server's speed it is a time.

    It follows from the counters. Of any two that wait neither is ahead by more than U. The tenant
    has its place among them, and its counter stands still while it waits. So each other, behind it
    by U at first and ahead by U at last, gains 2 U at the most. Weights divide the counters, hence
    service and U as well.
    """
    rng = world.rng
    world.largest_prompt, world.largest_output = 5, 55  # so that a batch may be output nearly all
    depths = {"": 50, "large": 50, "now-and-then": 2}
    outputs = {"": (1, 55), "large": (45, 55), "now-and-then": (1, 2), "bursts": (45, 55)}
    for tenant, weight in zip(outputs, weights, strict=True):
        world.set_weight(tenant, weight)
    bound = len(depths) * bound_of(weights)

    def put(tenant: str) -> None:
        world.put(tenant, rng.randint(1, 5), rng.randint(*outputs[tenant]))

    def step() -> None:
        world.step()
        for tenant, depth in depths.items():
            while world.waiting[tenant] < depth and rng.random() < 0.8:
                put(tenant)

    def served_to_others() -> float:
        return world.service.total() - world.service["bursts"]

    worst = 0.0
    for _ in range(12):
        for _ in range(rng.randint(1, 6)):  # puts its counter ahead, all the more in one batch
            put("bursts")
        while world.waiting["bursts"] or any(job.tenant == "bursts" for job in world.running):
            world.claim()
            step()
        before = served_to_others()
        put("bursts")
        while "bursts" not in world.claim():
            step()
            worst = max(worst, served_to_others() - before)
            assert worst <= bound
    print(f"worst {worst:.0f} of {bound:.0f}")


def test_a_flood_of_large_requests_does_not_hold_up_another_tenant(world: World) -> None:
    for _ in range(200):
        world.put("flood", 1, 20)
    for _ in range(20):
        world.claim()
        world.step()
    served = world.service.copy()
    for _ in range(10):
        world.put("other", 1, 5)
    while world.waiting["other"]:
        world.claim()
        world.step()
    gained = world.service - served
    assert gained["flood"] - gained["other"] <= bound_of([1])
    assert world.waiting["flood"] > 150


def test_weights_set_the_proportions(world: World) -> None:
    world.set_weight("half", 0.5)
    world.set_weight("triple", 3)
    tenants = ["half", "one", "triple"]
    for _ in range(3000):
        for tenant in tenants:
            while world.waiting[tenant] < 8:
                world.put(tenant, 10, 10)
        if sum(world.service.values()) > 15_000:
            break
        world.claim()
        world.step()
    tokens = {tenant: world.service[tenant] * world.weights.get(tenant, 1) for tenant in tenants}
    assert tokens["one"] / tokens["half"] == pytest.approx(2, rel=0.25)
    assert tokens["triple"] / tokens["one"] == pytest.approx(3, rel=0.25)


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
    for n in range(900):
        put_for(queue, f"{n:03}", "abc"[n % 3])
        queue.redis.hset(queue.keys.request(f"{n:03}"), "cancelled", "1")
    put_for(queue, "good", "c")
    assert taken(queue) == []
    assert queue.count() == 901 - 512
    assert taken(queue) == ["good"]


# --- idle times


def test_a_share_that_nobody_uses_goes_to_the_others(world: World) -> None:
    """A tenant alone fills the worker, whatever its counter says."""
    world.put("idle", 1, 1)
    for _ in range(60):
        while world.waiting["busy"] < 6:
            world.put("busy", 5, 20)
        world.claim()
        assert len(world.running) >= 5
        world.step()


def test_nothing_is_saved_up_nor_held_against_anyone(world: World) -> None:
    """A tenant that comes, or comes back after long, shares from then on as if it had always been
    there.
    """
    world.put("back", 5, 5)
    for _ in range(300):
        while world.waiting["alone"] < 6:
            world.put("alone", 5, 20)
        world.claim()
        world.step()
    assert world.service["alone"] > 3 * bound_of([1])
    bound = FairBound(world, bound_of([1]))
    for _ in range(100):
        for tenant in ("alone", "back", "new"):
            while world.waiting[tenant] < 6:
                world.put(tenant, 5, 20)
        bound.assert_holds()
        world.claim()
        world.step()
    assert bound.worst > 0


def test_who_served_alone_is_not_punished_when_others_come(world: World) -> None:
    """Also if its queue was empty for a while when they came."""
    for _ in range(100):
        world.put("alone", 5, 20)
        world.claim()
        world.step()
    while world.waiting["alone"] or world.running:
        world.claim()
        world.step()
    world.put("keeps-the-queue-awake", 1, 20)
    world.claim()
    before = world.service.copy()
    for _ in range(40):
        world.put("new", 5, 5)
    for _ in range(40):
        world.put("alone", 5, 5)
    while world.waiting["alone"] and world.waiting["new"]:
        world.claim()
        world.step()
    gained = world.service - before
    assert abs(gained["new"] - gained["alone"]) <= bound_of([1])


def test_what_an_estimate_took_too_much_is_given_back(world: World) -> None:
    """Long payloads of short prompts are no disadvantage, also where lengths are told late."""
    keys = world.queue.keys
    payloads = {"short": {"prompt": "x", "max_tokens": 2}}
    payloads["long"] = {**payloads["short"], "metadata": {"note": "y" * 400}}
    with world.client.pipeline() as pipe:
        for tenant, payload in payloads.items():
            for n in range(700):
                pipe.hset(keys.request(f"{tenant}{n}"), "payload", json.dumps(payload))
                pipe.zadd(keys.pending_of(tenant), {f"{tenant}{n}": n})
        pipe.sadd(keys.tenants_waiting, *payloads)
        pipe.execute()
    counts: Counter[str] = Counter()
    for _ in range(80):
        rows, held = [], []
        claims = [world.queue.take_batch(Room(1, 10**9))[0] for _ in range(8)]
        for claim in claims:
            counts[claim.request_id.rstrip("0123456789")] += 1
            event = TokenEvent(
                index=0, token_ids=[7], text="x", finish_reason=FinishReason.STOP, attempt=1,
                usage=Usage(prompt_tokens=1, completion_tokens=1),
            )  # fmt: skip
            rows.append(Row.of(claim.request_id, claim.fence, event))
            held.append(Held(claim.request_id, claim.fence, 1))
        world.queue.publish(rows, held)
    ahead = abs(counts["long"] - counts["short"]) * (PROMPT_WEIGHT + OUTPUT_WEIGHT)
    assert ahead <= 8 * len(json.dumps(payloads["long"])) / 4, "more than a claim's estimates"


def test_a_second_attempt_pays_only_for_what_it_adds(world: World) -> None:
    world.put("a", 30, 3)
    world.put("b", 30, 3)
    world.claim()
    world.step()
    world.finish_all()
    key = f"{world.queue.keys.prefix}tenants"
    counters = dict(world.client.zrange(key, 0, -1, withscores=True))
    world.put("a", 30, 3)
    world.put("b", 30, 3)
    world.claim()
    world.step()
    for _ in range(4):
        world.hand_back()
        world.claim()
    world.finish_all()
    now = dict(world.client.zrange(key, 0, -1, withscores=True))
    for tenant in (b"a", b"b"):
        added = now[tenant] - counters.get(tenant, counters[b"*"])
        assert added == 30 * PROMPT_WEIGHT + 3 * OUTPUT_WEIGHT


@pytest.mark.parametrize("others", [[], ["busy"]], ids=["alone", "beside another"])
def test_tenants_that_come_once_leave_nothing_behind(world: World, others: list[str]) -> None:
    keys = world.queue.keys
    for n in range(300):
        for tenant in [*others, f"once-{n}"]:
            world.put(tenant, 2, 2)
        world.claim()
        world.step()
    assert world.client.zcard(f"{keys.prefix}tenants") < 40
    assert world.client.scard(keys.tenants_waiting) < 40
    while world.waiting.total() or world.running:
        world.claim()
        if world.running:
            world.step()
    world.queue.take_batch(Room(10, 1000))
    left = {key.decode() for key in world.client.keys("*") if world.client.pttl(key) < 0}
    assert left <= {keys.prefix + "outputs"}


# --- plain clients, and what strangers do


def test_plain_clients_are_one_tenant(world: World) -> None:
    """However many they are and put in, they share with each named tenant alike."""
    while world.service.total() < 8000:
        while world.waiting[""] < 60:
            world.put("", 5, 20, plainly=True)
        while world.waiting["named"] < 20:
            world.put("named", 5, 20)
        world.claim()
        world.step()
    assert world.service[""] == pytest.approx(world.service["named"], abs=bound_of([1]))


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
