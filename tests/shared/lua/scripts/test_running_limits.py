"""No tenant has more requests at workers than its limit; others are taken past them."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from promptq.shared.protocol.claims import Claim, Held, Room
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, ids, put, put_plainly, row
from tests.support.servers import Server


def finish(queue: RequestQueue, claim: Claim) -> None:
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])


def test_a_tenant_gets_no_more_at_once_and_holds_nobody_up(
    client: Any, queue: RequestQueue
) -> None:
    client.hset(queue.keys.config, "tenant_max_running", 2)
    for n in range(4):
        put(queue, f"a{n}", tenant="a", priority=-1)  # in front of all others
        put(queue, f"b{n}", tenant="b")
        put(queue, f"u{n}")
    claims = queue.take_batch(ROOM)
    assert sorted(ids(claims)) == ["a0", "a1", "b0", "b1", "u0", "u1"]
    assert queue.take_batch(ROOM) == []
    finish(queue, claims[0])
    assert ids(queue.take_batch(ROOM)) == ["a2"]


def test_one_tenant_may_have_a_separate_limit(client: Any, queue: RequestQueue) -> None:
    settings = {"tenant_max_running": 1, "max_running:large": 3, "max_running:free": 0}
    client.hset(queue.keys.config, mapping=settings)
    for tenant in ("large", "free", "other"):
        for n in range(5):
            put(queue, f"{tenant}{n}", tenant=tenant)
    counts = Counter(request_id[:-1] for request_id in ids(queue.take_batch(ROOM)))
    assert counts == {"large": 3, "free": 5, "other": 1}


@pytest.mark.parametrize("field", ["tenant_max_running", "max_running:"])
def test_requests_without_a_tenant_are_limited_too(
    client: Any, queue: RequestQueue, field: str
) -> None:
    client.hset(queue.keys.config, field, 1)
    for n in range(3):
        put_plainly(client, queue, f"r{n}", n, '{"prompt":"a"}')
    (claim,) = queue.take_batch(ROOM)
    assert queue.take_batch(ROOM) == []
    queue.release([Held(claim.request_id, claim.fence)])
    assert ids(queue.take_batch(ROOM)) == ["r0"]


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "0"])
def test_a_limit_without_sense_is_none(client: Any, queue: RequestQueue, value: str) -> None:
    client.hset(queue.keys.config, "tenant_max_running", value)
    for n in range(3):
        put(queue, f"r{n}", tenant="a")
    assert len(queue.take_batch(ROOM)) == 3


def test_a_limit_holds_from_the_moment_that_it_is_set(client: Any, queue: RequestQueue) -> None:
    for n in range(6):
        put(queue, f"r{n}", tenant="a")
    claims = queue.take_batch(Room(4, 10**6))
    client.hset(queue.keys.config, "max_running:a", 3)
    for claim in claims[:2]:
        assert queue.take_batch(ROOM) == []
        finish(queue, claim)
    assert ids(queue.take_batch(ROOM)) == ["r4"]


def test_however_a_lease_ends_the_next_may_run(client: Any, server: Server) -> None:
    queue = RequestQueue(client, lease_ms=1, max_crashes=2)
    client.hset(queue.keys.config, "max_running:a", 1)

    def taken() -> Claim:
        (claim,) = queue.take_batch(ROOM)
        assert queue.take_batch(ROOM) == []
        return claim

    put(queue, "r0", tenant="a")
    queue.release([Held("r0", taken().fence)])
    taken()
    time.sleep(0.01)
    assert queue.reap().returned == 1
    claim = taken()
    put(queue, "r1", tenant="a")
    queue.cancel("r0")
    queue.publish([row(claim, 0)])  # which ends it
    assert taken().request_id == "r1"
    client.delete(queue.keys.request("r1"))
    time.sleep(0.01)
    assert queue.reap().ended == 1
    put(queue, "r2", tenant="a", deadline_ms=1)
    put(queue, "r3", tenant="a")
    time.sleep(0.01)
    assert taken().request_id == "r3"
    finish(queue, claim)


def test_ids_that_nobody_holds_are_forgotten(client: Any, queue: RequestQueue) -> None:
    """Whoever wrote them there: the leases say who holds what."""
    client.hset(queue.keys.config, "max_running:a", 2)
    key = f"{queue.keys.prefix}tenants:running:a"
    put(queue, "r0", tenant="a")
    assert ids(queue.take_batch(ROOM)) == ["r0"]
    client.zadd(key, {f"gone{n}": 0 for n in range(50)})
    put(queue, "r1", tenant="a")
    put(queue, "r2", tenant="a")
    claims = [queue.take_batch(ROOM) for _ in range(10)]
    assert [ids(it) for it in claims if it] == [["r1"]]
    assert client.zrange(key, 0, -1) == [b"r0", b"r1"]


def test_a_sweep_forgets_ids_that_nobody_holds(client: Any, queue: RequestQueue) -> None:
    """Without a limit no claim looks at them, and workers of earlier releases leave some."""
    key = f"{queue.keys.prefix}tenants:running:a"
    put(queue, "held", tenant="a")
    assert ids(queue.take_batch(ROOM)) == ["held"]
    client.zadd(key, {f"gone{n}": 0 for n in range(20)})
    for _ in range(5):
        queue.sweep()
    assert client.zrange(key, 0, -1) == [b"held"]


def test_a_key_of_another_type_stops_nothing(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "max_running:a", 2)
    client.set(f"{queue.keys.prefix}tenants:running:a", "x")
    put(queue, "r0", tenant="a")
    (claim,) = queue.take_batch(ROOM)
    finish(queue, claim)
    assert queue.is_empty()


def test_at_random_times_no_tenant_has_more_than_its_limit(client: Any, seed: int) -> None:
    rng = random.Random(seed)
    queue = RequestQueue(client, lease_ms=3_600_000, max_crashes=9)
    limits = {"": 3, "a": 1, "b": 2, "c": 0}
    for tenant, limit in limits.items():
        client.hset(queue.keys.config, f"max_running:{tenant}", limit)
    held: list[tuple[str, Claim]] = []
    num_ended = 0
    for n in range(100):
        put(queue, f"{n}", tenant=rng.choice(list(limits)) or None, priority=rng.randint(-1, 1))
        held += [(it.tenant, it) for it in queue.take_batch(Room(rng.randint(0, 5), 10**6))]
        counts = Counter(tenant for tenant, _ in held)
        assert all(counts[it] <= limit for it, limit in limits.items() if limit), counts
        for _ in range(rng.randint(0, 3) if held else 0):
            _, claim = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                queue.release([Held(claim.request_id, claim.fence)])
            else:
                finish(queue, claim)
                num_ended += 1
            if not held:
                break
    while queue.count() or held:
        for _, claim in held:
            finish(queue, claim)
        num_ended += len(held)
        held = [(it.tenant, it) for it in queue.take_batch(ROOM)]
    assert num_ended == 100
    assert not [*client.scan_iter(f"{queue.keys.prefix}tenants:running*")]
