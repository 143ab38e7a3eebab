"""Live records are never trimmed, and unreferenced ones go away."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, last_event, put, row

PAYLOAD = '{"prompt":"a"}'


def sweep(queue: RequestQueue) -> int:
    """Look at all keys once."""
    cursor, num_gone = "0", 0
    while True:
        swept = queue.sweep(cursor)
        cursor, num_gone = swept.cursor, num_gone + swept.num_gone
        if cursor == "0":
            return num_gone


def age(client: Any, queue: RequestQueue) -> None:
    """Let what was noted have been noted long ago."""
    orphans = queue.keys.prefix + "orphans"
    for name in client.zrange(orphans, 0, -1):
        client.zadd(orphans, {name: 1})


def test_a_live_stream_keeps_its_first_token_however_long_it_is(
    client: Any, queue: RequestQueue
) -> None:
    """Through upkeep, and from one attempt to the next; it has no end of its own either."""
    put(queue, "long")
    (claim,) = queue.take_batch(ROOM)
    num_tokens, at_once = 5000, 500
    for start in range(0, num_tokens, at_once):
        rows = [row(claim, index) for index in range(start, start + at_once)]
        assert set(queue.publish(rows, [held(claim)]).rows) == {"ok"}
    queue.reap()
    sweep(queue)
    log = queue.keys.tokens("long")
    assert (client.xlen(log), client.pttl(log)) == (num_tokens, -1)
    assert client.xrange(log, count=1)[0][0] == b"1-0"
    assert client.pttl(queue.keys.request("long")) == -1
    queue.release([held(claim)])
    (again,) = queue.take_batch(ROOM)
    assert [event.index for event in again.events] == list(range(num_tokens))
    queue.publish([row(again, num_tokens, reason=FinishReason.STOP)])
    assert client.xrange(log, count=1)[0][0] == b"1-0", "it can be read once more at the end"
    assert 0 < client.pttl(log) <= 60_000


def flag(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.request("x"), "cancelled", "1")


def log_alone(client: Any, queue: RequestQueue) -> None:
    client.xadd(queue.keys.tokens("x"), {"event": "{}"}, "1-0")


def something_else(client: Any, queue: RequestQueue) -> None:
    client.set(queue.keys.request("x"), "text")


@pytest.mark.parametrize("leave", [flag, log_alone, something_else])
def test_what_belongs_to_no_request_goes_away(
    client: Any, queue: RequestQueue, leave: Callable[[Any, RequestQueue], None]
) -> None:
    """A plain client's cancel, which it announced to nobody, and the like."""
    leave(client, queue)
    assert sweep(queue) == 0
    left = {queue.keys.request("x").encode(), queue.keys.tokens("x").encode()}
    assert left & set(client.keys("*")), "it may be half of what a plain client is about to do"
    age(client, queue)
    assert sweep(queue) == 1
    assert client.keys("*") == []


def never_put_in(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.request("x"), "payload", PAYLOAD)


def taken_out_by_hand(client: Any, queue: RequestQueue) -> None:
    put(queue, "x", tenant="t")
    client.delete(queue.keys.pending_of("t"))


def held_by_nobody(client: Any, queue: RequestQueue) -> None:
    put(queue, "x")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    client.delete(queue.keys.leases)


@pytest.mark.parametrize("leave", [never_put_in, taken_out_by_hand, held_by_nobody])
def test_a_request_that_is_nowhere_ends_and_expires(
    client: Any, queue: RequestQueue, leave: Callable[[Any, RequestQueue], None]
) -> None:
    """So that nobody waits for it for ever."""
    leave(client, queue)
    for _ in range(2):
        assert sweep(queue) == 0
    assert queue.state("x") in (RequestState.WAITING, RequestState.ACTIVE)
    age(client, queue)
    assert sweep(queue) == 1
    assert queue.state("x") is RequestState.FAILED
    assert "was in no queue" in last_event(queue, "x")["error"]["message"]
    assert 0 < client.pttl(queue.keys.request("x")) <= 3_600_000
    assert 0 < client.pttl(queue.keys.tokens("x")) <= 60_000
    assert queue.take_batch(ROOM) == []
    backlog = {key: value for key, value in client.hgetall(queue.keys.backlog).items() if value}
    assert backlog == {}
    assert sweep(queue) == 0


def test_what_has_a_place_stays(client: Any, queue: RequestQueue) -> None:
    """Waiting, with a tenant or without, delayed, running, a dead letter, or over."""
    client.hset(queue.keys.config, "crash_backoff_ms", "0")
    put(queue, "dead")
    for _ in range(3):
        queue.take_batch(ROOM)
        client.zadd(queue.keys.leases, {"dead": 1})
        queue.reap()
    assert queue.state("dead") is RequestState.DEAD
    for name in ("active", "done"):
        put(queue, name)
    active, done = queue.take_batch(ROOM)
    queue.publish([row(active, 0), row(done, 0, reason=FinishReason.STOP)])
    client.persist(queue.keys.request("done"))  # somebody wants to keep it
    put(queue, "waiting")
    put(queue, "tenants", tenant="t")
    put(queue, "delayed", delay_ms=100_000)
    for name, key in [("plain", queue.keys.pending), ("elsewhere", queue.keys.pending_of("t"))]:
        client.hset(queue.keys.request(name), "payload", PAYLOAD)
        client.zadd(key, {name: 1})
    names = ["dead", "active", "done", "waiting", "tenants", "delayed", "plain", "elsewhere"]
    states = [queue.state(name) for name in names]
    for _ in range(2):
        assert sweep(queue) == 0
        age(client, queue)
    assert [queue.state(name) for name in names] == states
    kept = [client.pttl(queue.keys.request(name)) for name in names]
    assert kept == [-1] * len(names)


def test_who_puts_a_request_in_by_and_by_is_not_disturbed(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.request("x"), "payload", PAYLOAD)
    sweep(queue)
    client.zadd(queue.keys.pending, {"x": 1})
    age(client, queue)
    assert sweep(queue) == 0
    assert client.pttl(queue.keys.request("x")) == -1
    assert ids(queue.take_batch(ROOM)) == ["x"]
    assert client.exists(queue.keys.prefix + "orphans") == 0


def test_a_flag_that_came_first_still_cancels(client: Any, queue: RequestQueue) -> None:
    flag(client, queue)
    sweep(queue)
    put(queue, "x")
    assert queue.cancel("x") is CancelStatus.CANCELLED
    age(client, queue)
    assert sweep(queue) == 0
    assert json.loads(client.hget(queue.keys.request("x"), "last_event"))["index"] == 0


def test_other_queues_and_other_keys_are_left_alone(client: Any, queue: RequestQueue) -> None:
    other = RequestQueue(client, "other")
    client.hset(other.keys.request("x"), "cancelled", "1")
    client.hset("request:x", "cancelled", "1")
    for _ in range(2):
        sweep(queue)
        age(client, queue)
    assert client.exists(other.keys.request("x"), "request:x") == 2
    assert client.exists(queue.keys.prefix + "orphans") == 0


def test_a_tenant_that_the_server_forgot_is_served_again(client: Any, queue: RequestQueue) -> None:
    """A server that evicts keys may drop the set of tenants and keep their queues."""
    put(queue, "x", tenant="t")
    client.delete(queue.keys.prefix + "tenants:waiting")
    client.set(queue.keys.pending + ":text", "of a stranger")
    assert ids(queue.take_batch(ROOM)) == []
    sweep(queue)
    assert client.smembers(queue.keys.prefix + "tenants:waiting") == {b"t"}
    assert ids(queue.take_batch(ROOM)) == ["x"]
