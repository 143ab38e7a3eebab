"""A reaper ends, brings back and buries requests; some are run again."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, last_event, new, put, put_plainly, row


def test_a_deadline_ends_a_waiting_request(queue: RequestQueue) -> None:
    put(queue, "a", deadline_ms=50)
    put(queue, "b", deadline_ms=50)
    time.sleep(0.1)
    assert queue.take_batch(ROOM) == []
    assert last_event(queue, "a")["finish_reason"] == "expired"
    assert queue.state("b") is RequestState.EXPIRED


def test_a_deadline_ends_a_running_request(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", deadline_ms=60_000)
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    client.zadd(queue.keys.deadlines, {"a": 1})
    assert queue.publish([row(claim, 1)]).rows == [RowStatus.EXPIRED]
    assert last_event(queue, "a")["usage"]["completion_tokens"] == 1


def test_a_deadline_counts_however_many_others_have_passed(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "held")
    (claim,) = queue.take_batch(ROOM)
    queue.enqueue([new(deadline_ms=50, priority=5) for _ in range(1200)])
    put(queue, "urgent", deadline_ms=100, priority=-5)
    time.sleep(0.15)
    client.zadd(queue.keys.deadlines, {"held": time.time() * 1000 - 1})
    assert queue.take_batch(Room(max_count=1, token_budget=10**9)) == []
    assert queue.state("urgent") is RequestState.EXPIRED
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.EXPIRED]


def test_a_reaper_reports_that_there_is_more(queue: RequestQueue) -> None:
    queue.enqueue([new(deadline_ms=1) for _ in range(1200)])
    time.sleep(0.05)
    first, second = queue.reap(), queue.reap()
    assert (first.ended, first.has_more) == (1000, True)
    assert (second.ended, second.has_more) == (200, False)


def test_an_end_stays_though_a_deadline_is_put_to_it(client: Any, queue: RequestQueue) -> None:
    """A plain client may send its commands again after the log has expired."""
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    before = client.hgetall(queue.keys.request("a"))
    client.delete(queue.keys.tokens("a"))
    client.zadd(queue.keys.deadlines, {"a": 1})
    queue.reap()
    assert client.hgetall(queue.keys.request("a")) == before
    assert not client.exists(queue.keys.tokens("a"), queue.keys.deadlines)


def test_a_reaper_expires_what_no_worker_meets(queue: RequestQueue) -> None:
    put(queue, "a", deadline_ms=50)
    time.sleep(0.1)
    assert queue.reap().ended == 1
    assert queue.state("a") is RequestState.EXPIRED


def test_what_crashes_its_workers_becomes_a_dead_letter(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=50, max_crashes=2)
    put(queue, "poison", priority=-3)
    for _ in range(2):
        assert len(queue.take_batch(ROOM)) == 1
        time.sleep(0.1)
        reaped = queue.reap()
    assert (reaped.returned, reaped.dead) == (0, 1)
    assert queue.state("poison") is RequestState.DEAD
    end = last_event(queue, "poison")
    assert end["error"]["type"] == "dead_letter"
    assert "2 crashes" in end["error"]["message"]
    assert client.pttl(queue.keys.request("poison")) == -1, "dead letters are kept"

    fresh = queue.requeue("poison")
    record = queue.run(lookups.record(queue.keys, fresh))
    assert record["requeued_from"] == "poison"
    (claim,) = queue.take_batch(ROOM)
    assert (claim.request_id, claim.attempt, claim.events) == (fresh, 1, [])
    with pytest.raises(RequestNotFoundError):
        queue.requeue("poison")


def test_a_requeue_that_is_sent_again_says_the_same(client: Any) -> None:
    """Its reply was lost, and the client sends the same call once more."""
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "poison")
    for _ in range(2):
        (claim,) = queue.take_batch(ROOM)
        queue.release([held(claim)], crashed=True)
    again = scripts.requeue("poison", "fresh")
    assert [queue.run(again), queue.run(again)] == ["ok", "ok"]
    assert [claim.request_id for claim in queue.take_batch(ROOM)] == ["fresh"]


def test_handing_back_is_no_crash(client: Any) -> None:
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "a")
    for _ in range(5):
        (claim,) = queue.take_batch(ROOM)
        queue.release([held(claim)])
    assert queue.state("a") is RequestState.WAITING


def test_a_cancelled_request_whose_worker_died_ends_as_cancelled(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=1)
    put(queue, "a")
    queue.take_batch(ROOM)
    queue.cancel("a")
    time.sleep(0.01)
    assert queue.reap().ended == 1
    assert queue.state("a") is RequestState.CANCELLED


def test_a_reaper_leaves_a_held_request_to_its_holder(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    client.zadd(queue.keys.deadlines, {"a": 1})
    assert queue.reap().ended == 0
    assert queue.publish([], [held(claim)]).held == [RowStatus.EXPIRED]


def test_a_lease_that_outlived_its_request_is_dropped(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.cancel("a")
    client.zadd(queue.keys.leases, {"a": 1})
    assert queue.reap().returned == 0
    assert client.zcard(queue.keys.leases) == 0


def test_a_dead_letter_is_run_again_with_its_priority_and_then_forgotten(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=1, max_crashes=1)
    put(queue, "scripted", priority=-7)
    put_plainly(client, queue, "plain", 1, '{"prompt":"a","priority":-7}')
    for _ in range(3):  # with others, then each alone
        queue.take_batch(ROOM)
        time.sleep(0.01)
        queue.reap()
    for name in ("scripted", "plain"):
        assert queue.run(scripts.requeue(name, name)) == "exists"
        score = client.zscore(queue.keys.pending, queue.requeue(name))
        assert abs(score - (time.time() * 1000 - 7 * 60_000)) < 30_000
        assert client.pttl(queue.keys.request(name)) > 0
        result = json.loads(queue.run(lookups.record(queue.keys, name))["result"])
        assert result["error"]["type"] == "dead_letter"


def test_a_reaper_brings_what_was_delayed(queue: RequestQueue) -> None:
    put(queue, "later", delay_ms=1)
    time.sleep(0.01)
    assert queue.reap().returned == 1
    assert queue.contains("later")
