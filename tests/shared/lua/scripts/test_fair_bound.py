"""Tenants share what is served: in proportion to their weights, within a bound, wasting nothing.

The bound is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), theorem
4.4: two tenants that have something waiting all the time differ in what they get by at most twice
the larger of a prompt's service and that of a full batch's output. There is also its bound on how
long the request of another tenant is delayed.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from promptq.shared.protocol.claims import Claim, Held, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.roles import QueueClient, as_role

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
LARGEST_PROMPT, LARGEST_OUTPUT = 40, 20
ROOM = 5 * (LARGEST_PROMPT + LARGEST_OUTPUT)
LONGEST_ESTIMATE = 60
"""The scripts' estimate for the longest prompt before it is tokenised: a quarter of its payload."""


@dataclass
class Job:
    """A request: its tenant and true lengths, and how many tokens it has so far."""

    tenant: str
    prompt_tokens: int
    num_output: int
    num_emitted: int = 0
    was_claimed: bool = False
    told: bool = False
    claim: Claim | None = None


class World:
    """A queue with tenants and a worker, driven step by step by the real scripts.

    `room` is how many tokens of KV the worker has; no request is larger than `largest`.

    Every request is of `priority`. `service` is what each tenant got, by true lengths and weight.
    """

    def __init__(self, client: Any, rng: random.Random, *, room: int, largest: tuple[int, int]):
        self.client = client
        self.rng = rng
        self.queue = RequestQueue(client)
        self.room, self.largest_prompt, self.largest_output = room, *largest
        self.priority = 0
        self.weights: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self.running: list[Job] = []
        self.service: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._num = 0

    def set_weight(self, tenant: str, weight: float) -> None:
        self.weights[tenant] = weight
        self.client.hset(self.queue.keys.config, f"weight:{tenant}", weight)

    def put(
        self, tenant: str, prompt_tokens: int, num_output: int, *, plainly: bool = False
    ) -> str:
        """Enqueue by script, or with nothing but plain commands."""
        self._num += 1
        request_id = f"{self._num:06}"
        keys = self.queue.keys
        fields = {
            "prompt": "x" * prompt_tokens,
            "max_tokens": num_output,
            "priority": self.priority,
        }
        if plainly:
            key = keys.pending_of(tenant)
            with self.client.pipeline() as pipe:
                pipe.hset(keys.request(request_id), "payload", json.dumps(fields))
                pipe.zadd(key, {request_id: self._num})
                if tenant:
                    pipe.sadd(keys.tenants_waiting, tenant)
                pipe.execute()
        else:
            request = Request.build({**fields, "tenant": tenant or None})
            self.queue.enqueue([NewRequest(request_id, request)])
        self.jobs[request_id] = Job(tenant, prompt_tokens, num_output)
        self.waiting[tenant] += 1
        return request_id

    def claim(self) -> list[str]:
        """Take what there is room for for certain."""
        free = self.room - sum(job.prompt_tokens + job.num_output for job in self.running)
        count = free // (self.largest_prompt + self.largest_output)
        claims = self.queue.take_batch(Room(max_count=count, token_budget=2**40)) if count else []
        for claim in claims:
            job = self.jobs[claim.request_id]
            job.claim = claim
            self.running.append(job)
            self.waiting[job.tenant] -= 1
            if not job.was_claimed:
                self._serve(job, PROMPT_WEIGHT * job.prompt_tokens)
            job.was_claimed = True
        return [self.jobs[claim.request_id].tenant for claim in claims]

    def step(self) -> None:
        """One token for each that runs, in one call; those that have all of theirs end."""
        rows, held = [], []
        for job in self.running:
            assert job.claim is not None
            ended = job.num_emitted + 1 == job.num_output
            reason = FinishReason.LENGTH if ended else None
            usage = Usage(prompt_tokens=job.prompt_tokens) if ended else None
            event = TokenEvent(
                index=job.num_emitted, token_ids=[7], text="x", finish_reason=reason,
                attempt=job.claim.attempt, usage=usage,
            )  # fmt: skip
            rows.append(Row.of(job.claim.request_id, job.claim.fence, event))
            if not job.told:
                held.append(Held(job.claim.request_id, job.claim.fence, job.prompt_tokens))
                job.told = True
        published = self.queue.publish(rows, held)
        assert set(published.rows) <= {RowStatus.OK}
        for job in self.running:
            job.num_emitted += 1
            self._serve(job, OUTPUT_WEIGHT)
        self.running = [job for job in self.running if job.num_emitted < job.num_output]

    def hand_back(self) -> None:
        """Release one that runs, as a draining worker does."""
        if self.running:
            job = self.running.pop(self.rng.randrange(len(self.running)))
            assert job.claim is not None
            assert self.queue.release([Held(job.claim.request_id, job.claim.fence)]) == ["waiting"]
            self.waiting[job.tenant] += 1

    def finish_all(self) -> None:
        while self.running:
            self.step()

    def _serve(self, job: Job, service: float) -> None:
        self.service[job.tenant] += service / self.weights.get(job.tenant, 1)


class FairBound:
    """Holds what any two tenants get, while both have something waiting, to `most`.

    The difference of their service since any moment of such a time may not exceed it.
    """

    def __init__(self, world: World, most: float) -> None:
        self.world = world
        self.most = most
        self.worst = 0.0
        self._range: dict[tuple[str, str], tuple[float, float]] = {}

    def assert_holds(self) -> None:
        for pair in combinations(sorted(self.world.waiting), 2):
            one, other = pair
            if not (self.world.waiting[one] and self.world.waiting[other]):
                self._range.pop(pair, None)
                continue
            difference = self.world.service[one] - self.world.service[other]
            low, high = self._range.get(pair, (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self._range[pair] = (low, high)
            self.worst = max(self.worst, high - low)
            assert high - low <= self.most, f"{one!r} against {other!r}: {high - low}"


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


@pytest.mark.matrix(1)
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


@pytest.mark.matrix(1)
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
    """A long payload of a short prompt is no disadvantage, even if workers report lengths late."""
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
