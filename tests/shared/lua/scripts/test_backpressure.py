"""A full queue refuses, says by which limit and when to come back; its counts do not drift."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import pytest

from promptq.shared.errors import QueueFullError
from promptq.shared.protocol.claims import Claim, Held, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason, NewRequest, RequestState
from promptq.shared.protocol.rows import Row
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, new, put
from tests.support.servers import Server


@pytest.fixture
def queue(client: Any) -> RequestQueue:
    return RequestQueue(client, lease_ms=1, max_crashes=2)


def limit(client: Any, queue: RequestQueue, **settings: int) -> None:
    """`a__B` stands for the setting `a:B`."""
    settings = {name.replace("__", ":"): value for name, value in settings.items()}
    client.hset(queue.keys.config, mapping=settings)


def tokens_of(request: NewRequest) -> int:
    """Returns the estimate of a request's tokens: a quarter of its payload's bytes, and its
    `max_tokens`.
    """
    return -(-len(request.request.to_payload()) // 4) + (request.request.max_tokens or 256)


def backlog(client: Any, queue: RequestQueue) -> dict[str, int]:
    counts = client.hgetall(queue.keys.backlog)
    return {field.decode(): int(value) for field, value in counts.items()}


def finish(queue: RequestQueue, claim: Claim) -> None:
    event = TokenEvent(
        index=0, token_ids=[7], text="x", finish_reason=FinishReason.STOP, attempt=1, usage=Usage()
    )
    queue.publish([Row.of(claim.request_id, claim.fence, event)])


# --- limits


def test_pending_tokens_of_the_queue_are_limited(client: Any, queue: RequestQueue) -> None:
    limit(client, queue, max_pending_tokens=tokens_of(new("a")) * 2)
    put(queue, "a")
    put(queue, "b")
    with pytest.raises(QueueFullError, match="max_pending_tokens") as caught:
        put(queue, "c")
    assert caught.value.limit == "max_pending_tokens"
    assert caught.value.retry_after_ms > 0
    assert queue.count() == 2
    queue.take_batch(Room(1, 10**9))
    put(queue, "c")


def test_each_tenant_has_separate_limits(client: Any, queue: RequestQueue) -> None:
    limit(client, queue, tenant_max_pending=2, max_pending__small=1, max_pending__free=0)
    put(queue, "s1", tenant="small")
    with pytest.raises(QueueFullError) as caught:
        put(queue, "s2", tenant="small")
    assert caught.value.limit == "max_pending:small"
    for tenant in ("other", None):
        put(queue, f"{tenant}1", tenant=tenant)
        put(queue, f"{tenant}2", tenant=tenant)
        with pytest.raises(QueueFullError) as caught:
            put(queue, f"{tenant}3", tenant=tenant)
        assert caught.value.limit == f"max_pending:{tenant or ''}"
    for n in range(5):
        put(queue, f"f{n}", tenant="free")


def test_pending_tokens_of_a_tenant_are_limited(client: Any, queue: RequestQueue) -> None:
    limit(client, queue, tenant_max_pending_tokens=250, max_pending_tokens__large=1000)
    put(queue, "a1", tenant="a", max_tokens=100)
    put(queue, "b1", tenant="b", max_tokens=100)
    with pytest.raises(QueueFullError) as caught:
        put(queue, "a2", tenant="a", max_tokens=150)
    assert caught.value.limit == "max_pending_tokens:a"
    put(queue, "l", tenant="large", max_tokens=900)


def test_a_limit_keeps_the_whole_batch_out(client: Any, queue: RequestQueue) -> None:
    limit(client, queue, max_pending__a=1)
    with pytest.raises(QueueFullError):
        queue.enqueue([new("b", tenant="b"), new("a1", tenant="a"), new("a2", tenant="a")])
    assert queue.is_empty()
    assert queue.state("b") is None
    assert backlog(client, queue) == {}


def test_delayed_requests_count_for_their_tenant(client: Any, queue: RequestQueue) -> None:
    limit(client, queue, max_pending__a=1)
    put(queue, "later", tenant="a", delay_ms=1)
    with pytest.raises(QueueFullError):
        put(queue, "now", tenant="a")
    put(queue, "other", tenant="b")
    time.sleep(0.01)
    queue.reap()
    with pytest.raises(QueueFullError):
        put(queue, "now", tenant="a")
    assert queue.cancel("later") == "cancelled"
    put(queue, "now", tenant="a")


def test_requests_put_in_by_plain_commands_count_by_number(
    client: Any, queue: RequestQueue
) -> None:
    limit(client, queue, max_pending=2)
    client.hset(queue.keys.request("plain"), "payload", '{"prompt":"a"}')
    client.zadd(queue.keys.pending_of("team"), {"plain": 1})
    client.sadd(queue.keys.tenants_waiting, "team")
    put(queue, "a")
    with pytest.raises(QueueFullError):
        put(queue, "b")


def test_the_estimate_counts_the_excess_and_the_tenants_share(
    client: Any, queue: RequestQueue
) -> None:
    """By the rate of the last ten finishes; beside another tenant it takes twice as long."""
    for n in range(10):
        put(queue, f"{n}")
    for claim in queue.take_batch(ROOM):
        finish(queue, claim)
        time.sleep(0.02)
    finished = [
        int(entry.split()[0]) for entry in client.lrange(queue.keys.prefix + "outputs", 0, -1)
    ]
    each = (finished[0] - finished[-1]) / 9
    limit(client, queue, max_pending=1)
    with pytest.raises(QueueFullError) as caught:
        queue.enqueue([new(f"x{n}") for n in range(4)])
    assert caught.value.retry_after_ms == pytest.approx(3 * each, abs=1)
    limit(client, queue, max_pending=0, max_pending_tokens=2 * tokens_of(new("x0")))
    with pytest.raises(QueueFullError) as caught:
        queue.enqueue([new(f"x{n}") for n in range(4)])
    assert caught.value.retry_after_ms == pytest.approx(2 * each, abs=1)
    limit(client, queue, max_pending_tokens=0, max_pending__a=1)
    put(queue, "b", tenant="b")
    with pytest.raises(QueueFullError) as caught:
        queue.enqueue([new(f"a{n}", tenant="a") for n in range(4)])
    assert caught.value.retry_after_ms == pytest.approx(2 * 3 * each, abs=1)


def test_a_paused_queue_takes_in_up_to_its_limits(client: Any, queue: RequestQueue) -> None:
    limit(client, queue, paused=1, max_pending=2)
    put(queue, "a", tenant="t")
    put(queue, "b")
    assert queue.take_batch(ROOM) == []
    with pytest.raises(QueueFullError):
        put(queue, "c")
    limit(client, queue, paused=0)
    assert sorted(claim.request_id for claim in queue.take_batch(ROOM)) == ["a", "b"]


# --- counts that do not drift


def test_what_is_counted_is_what_waits(
    client: Any, queue: RequestQueue, pytestconfig: pytest.Config, seed: int
) -> None:
    """After any mix of what moves requests, by whomever, the counts are those of the ids there."""
    rng = random.Random(seed)
    requests: dict[str, NewRequest] = {}
    claims: list[Claim] = []
    for n in range(400 if pytestconfig.option.whole else 200):
        request_id = f"{n}"
        tenant = rng.choice([None, "a", "b"])
        action = rng.choice(
            ["put", "put", "put", "plain", "claim", "end", "back", "cancel", "reap"]
        )
        if action == "put":
            item = new(request_id, tenant=tenant, max_tokens=rng.randint(1, 50))
            if rng.random() < 0.2:
                item.request.deadline_ms = 1
            delay_ms = rng.choice([0, 0, 0, 1, 60_000])
            queue.enqueue([NewRequest(request_id, item.request, delay_ms)])
            requests[request_id] = item
        elif action == "plain":
            key = queue.keys.pending_of(tenant or "")
            client.hset(queue.keys.request(request_id), "payload", json.dumps({"prompt": "a"}))
            client.zadd(rng.choice([key, queue.keys.delayed]), {request_id: 1})
            if tenant:
                client.sadd(queue.keys.tenants_waiting, tenant)
        elif action == "claim":
            claims += queue.take_batch(Room(rng.randint(1, 4), 10**9))
        elif action == "end" and claims:
            finish(queue, claims.pop(rng.randrange(len(claims))))
        elif action == "back" and claims:
            claim = claims.pop(rng.randrange(len(claims)))
            queue.release([Held(claim.request_id, claim.fence)])
        elif action == "cancel" and n:
            queue.cancel(str(rng.randrange(n)))
        elif action == "reap":
            time.sleep(0.002)
            queue.reap()
        expected: dict[str, int] = {}
        delayed = set(client.zrange(queue.keys.delayed, 0, -1))
        for waiting_id, item in requests.items():
            if queue.state(waiting_id) is RequestState.WAITING:
                of = item.request.tenant or ""
                expected[f"tokens:{of}"] = expected.get(f"tokens:{of}", 0) + tokens_of(item)
                if waiting_id.encode() in delayed:
                    expected[f"delayed:{of}"] = expected.get(f"delayed:{of}", 0) + 1
                elif of:
                    expected["waiting"] = expected.get("waiting", 0) + 1
        assert backlog(client, queue) == expected, (n, action)
    queue.clear()
    assert backlog(client, queue) == {}


def test_counts_are_mended_when_nothing_waits(client: Any, queue: RequestQueue) -> None:
    """Somebody deleted what waited, by hand."""
    limit(client, queue, max_pending_tokens=tokens_of(new("a")))
    put(queue, "a")
    client.delete(queue.keys.pending, queue.keys.request("a"))
    put(queue, "b")
    with pytest.raises(QueueFullError):
        put(queue, "c")
    for claim in queue.take_batch(ROOM):
        finish(queue, claim)
    assert queue.take_batch(ROOM) == []
    assert backlog(client, queue) == {}


# --- idempotency keys


@pytest.mark.parametrize("tenant", [None, "team"])
def test_racing_producers_with_one_key_get_one_request_and_one_stream(
    server: Server, client: Any, queue: RequestQueue, tenant: str | None
) -> None:
    for n in range(10):
        barrier = threading.Barrier(4)
        got: list[str] = []

        def produce(own_id: str, key: str, barrier: threading.Barrier, got: list[str]) -> None:
            with server.connect() as own_client:
                own = RequestQueue(own_client)
                barrier.wait()
                got.append(put(own, own_id, idempotency_key=key, tenant=tenant))

        threads = [
            threading.Thread(target=produce, args=(f"{n}-{i}", f"key-{n}", barrier, got))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 4
        assert len(set(got)) == 1
        assert queue.count() == 1
        (claim,) = queue.take_batch(ROOM)
        assert claim.request_id == got[0]
        finish(queue, claim)
        assert len(client.keys(f"{queue.keys.prefix}request:{n}-*")) == 1
        assert len(client.keys(f"{queue.keys.prefix}tokens:{n}-*")) == 1
        assert put(queue, f"{n}-late", idempotency_key=f"key-{n}", tenant=tenant) == got[0]
        assert queue.is_empty()
