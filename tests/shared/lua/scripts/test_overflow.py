"""Overflow workers claim only requests that the queue's other workers would finish too late."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from promptq.shared.protocol.claims import Claims, ModelIdentity, Room
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, scripts, statistics
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.statistics import Contribution
from tests.support.requests import ROOM, held, ids, log_of, put, row
from tests.support.waiting import until

SECONDS_EACH = 1000
"""At the speed of `measured`, one worker ends a request in this time. It is long beside a test."""
OWN, OTHER = ModelIdentity("m", "own"), ModelIdentity("other", "other")


def deadline(requests: float) -> int:
    """Returns a deadline (ms) by which one worker ends this number of requests."""
    return int(requests * SECONDS_EACH * 1000)


def report(queue: RequestQueue, worker: str = "w1", **stats: Any) -> int:
    return queue.run(scripts.heartbeat(WorkerStats(worker_id=worker, **stats), 60_000))


@pytest.fixture
def measured(client: Any, queue: RequestQueue) -> RequestQueue:
    """A queue that may overflow, with one worker of a known speed."""
    client.hset(queue.keys.config, "overflow_ms", 0)
    client.xadd(queue.keys.statistics, {"worker_tokens_per_second": 256 / SECONDS_EACH}, "1000-0")
    report(queue)
    return queue


def overflow(queue: RequestQueue, room: Room = ROOM) -> Claims:
    """Returns the claims of an overflow worker with the model of `queue`."""
    return RequestQueue(queue.redis, model=queue.model, is_overflow=True).take_batch(room)


def spilt(queue: RequestQueue, room: Room = ROOM) -> list[str]:
    return ids(overflow(queue, room))


def put_late(queue: RequestQueue, *names: str, **fields: Any) -> None:
    """Enqueues requests that one worker would end too late."""
    for name in names:
        put(queue, name, **{"deadline_ms": deadline(0.5)} | fields)


class TestEstimate:
    """The claim compares a request's deadline with its place, and with the workers' speed."""

    def test_requests_that_would_end_in_time_are_left(self, measured: RequestQueue) -> None:
        for number in range(9):
            put(measured, f"r{number}", deadline_ms=deadline(5.5))
        put(measured, "patient")
        assert spilt(measured) == ["r5", "r6", "r7", "r8"]
        assert spilt(measured) == []
        assert ids(measured.take_batch(ROOM)) == ["r0", "r1", "r2", "r3", "r4", "patient"]

    def test_the_nearest_deadline_comes_first(self, measured: RequestQueue) -> None:
        for name, at in (("third", 0.9), ("first", 0.3), ("second", 0.6)):
            put(measured, name, deadline_ms=deadline(at))
        one = replace(ROOM, max_count=1)
        assert [spilt(measured, one) for _ in range(3)] == [["first"], ["second"], ["third"]]

    def test_those_behind_a_claimed_request_move_up(self, measured: RequestQueue) -> None:
        put(measured, "a", deadline_ms=deadline(0.5))
        put(measured, "b", deadline_ms=deadline(1.5))
        assert spilt(measured) == ["a"]
        assert measured.count() == 1

    def test_running_requests_come_before(self, measured: RequestQueue) -> None:
        put(measured, "r", deadline_ms=deadline(3.5))
        report(measured, num_running=2)
        assert spilt(measured) == []
        report(measured, num_running=3)
        assert spilt(measured) == ["r"]

    def test_several_workers_are_faster(self, measured: RequestQueue) -> None:
        put(measured, "r", deadline_ms=deadline(0.6))
        report(measured, "w2")
        assert spilt(measured) == []
        report(measured, "w2", state="draining")
        assert spilt(measured) == ["r"]

    def test_answers_are_as_long_as_lately(self, client: Any, measured: RequestQueue) -> None:
        put(measured, "r", deadline_ms=deadline(1.5))
        client.lpush(measured.keys.prefix + "outputs", "1000 128")
        assert spilt(measured) == []
        client.lpush(measured.keys.prefix + "outputs", *["1000 512"] * 9)
        assert spilt(measured) == ["r"]

    def test_more_urgent_requests_come_before(self, measured: RequestQueue) -> None:
        put(measured, "r", deadline_ms=deadline(2.5))
        put(measured, "urgent", priority=-5)
        put(measured, "later", priority=5)
        assert spilt(measured) == []
        put(measured, "also", priority=-5)
        assert spilt(measured) == ["r"]

    def test_tenants_share_the_workers(self, client: Any, measured: RequestQueue) -> None:
        put(measured, "a", tenant="a", deadline_ms=deadline(2.5))
        put(measured, "b", tenant="b")
        assert spilt(measured) == [], "it is the first of its tenant, which has half of the worker"
        client.hset(measured.keys.config, "weight:b", 3)
        (claim,) = overflow(measured)
        assert (claim.request_id, claim.tenant) == ("a", "a")

    def test_at_an_unknown_speed_only_the_margin_counts(
        self, client: Any, queue: RequestQueue
    ) -> None:
        put(queue, "near", deadline_ms=deadline(1))
        put(queue, "far", deadline_ms=deadline(3))
        client.hset(queue.keys.config, "overflow_ms", deadline(2))
        assert spilt(queue) == ["near"]

    def test_a_queue_does_not_overflow_unless_it_is_set(
        self, client: Any, measured: RequestQueue
    ) -> None:
        put_late(measured, "r")
        client.hdel(measured.keys.config, "overflow_ms")
        assert spilt(measured) == []
        client.hset(measured.keys.config, mapping={"overflow_ms": 0, "paused": 1})
        assert spilt(measured) == []

    def test_tokens_of_overflow_workers_are_no_speed_of_the_queue(
        self, client: Any, measured: RequestQueue
    ) -> None:
        report(measured, "cloud", overflow=True)
        running = measured.keys.prefix + "statistics:open"
        client.hset(running, mapping={"bucket": 5000, "workers": 1})
        measured.run(statistics.sample(Contribution(generated_tokens=10, overflow_tokens=90)))
        client.hset(running, "bucket", 10_000)
        measured.run(statistics.sample(Contribution()))
        entry = client.xrevrange(measured.keys.statistics, count=1)[0][1]
        assert float(entry[b"tokens_per_second"]) == 20.0
        assert float(entry[b"overflow_tokens_per_second"]) == 18.0
        assert float(entry[b"worker_tokens_per_second"]) <= 2.0


class TestLimits:
    """All overflow workers of a queue share a rate and a budget."""

    @pytest.mark.parametrize("name", ["overflow_tokens_per_minute", "overflow_tokens_per_day"])
    def test_claims_take_tokens(self, client: Any, measured: RequestQueue, name: str) -> None:
        put_late(measured, "a", "b", "c", "d", max_tokens=100)
        (claim,) = overflow(measured, replace(ROOM, max_count=1))
        assert claim.request_id == "a"
        client.hset(measured.keys.config, name, claim.cost * 2 + 1)
        assert spilt(measured) == ["b", "c"]
        assert spilt(measured) == []
        (field,) = client.hkeys(rates := measured.keys.prefix + "rate::overflow")
        client.hset(rates, field, 1)  # the time is over
        assert spilt(measured) == ["d"]

    def test_what_exceeds_a_limit_alone_stays(self, client: Any, measured: RequestQueue) -> None:
        put_late(measured, "large", max_tokens=5000)
        put_late(measured, "small", max_tokens=10)
        client.lpush(measured.keys.prefix + "outputs", "1000 5000")
        client.hset(measured.keys.config, "overflow_tokens_per_day", 1000)
        assert spilt(measured) == ["small"]
        assert ids(measured.take_batch(ROOM)) == ["large"]

    def test_slots(self, measured: RequestQueue) -> None:
        put_late(measured, "a", "b", "c")
        room = replace(ROOM, max_count=2, num_sharing=9)
        assert spilt(measured, room) == ["a", "b"], "overflow workers keep no shares for each other"


class TestLeft:
    """Requests that stay for the queue's other workers."""

    def test_ended_held_and_delayed_requests(self, client: Any, measured: RequestQueue) -> None:
        put_late(measured, "held")
        measured.take_batch(ROOM)
        put_late(measured, "cancelled", "flagged", "r")
        measured.cancel("cancelled")
        client.hset(measured.keys.request("flagged"), "cancelled", 1)
        assert spilt(measured) == ["r"]
        assert measured.state("flagged") is RequestState.CANCELLED

    def test_suspects(self, client: Any, measured: RequestQueue) -> None:
        put_late(measured, "suspect")
        client.hset(measured.keys.request("suspect"), "suspect", 1)
        assert spilt(measured) == []

    def test_what_an_overflow_worker_could_not_prepare(self, measured: RequestQueue) -> None:
        put_late(measured, "r")
        (claim,) = overflow(measured)
        assert measured.run(scripts.release([held(claim)], needs=["overflow"])) == ["waiting"]
        assert spilt(measured) == []
        assert ids(measured.take_batch(replace(ROOM, refused=["logprobs"]))) == ["r"]

    def test_requests_that_do_not_fit_keep_their_turns(
        self, client: Any, measured: RequestQueue
    ) -> None:
        put_late(measured, "large", max_tokens=300)
        for number in range(20):
            put_late(measured, f"r{number}", max_tokens=10)
            assert spilt(measured, replace(ROOM, token_budget=200)) == [f"r{number}"]
        assert client.hget(measured.keys.request("large"), "passed") is None

    def test_a_tenant_at_its_limit(self, client: Any, measured: RequestQueue) -> None:
        client.hset(measured.keys.config, "max_running:t", 1)
        put_late(measured, "a", "b", tenant="t")
        put_late(measured, "c")
        assert spilt(measured) == ["a", "c"]


class TestForeign:
    """No stream continues exactly after a worker with another model."""

    @staticmethod
    def queues(client: Any) -> tuple[RequestQueue, RequestQueue]:
        """Returns queue objects with the queue's model and with another one."""
        own, other = (RequestQueue(client, model=model) for model in (OWN, OTHER))
        own.take_batch(ROOM)
        return own, other

    def test_later_attempts_are_told(self, client: Any, measured: RequestQueue) -> None:
        own, other = self.queues(client)
        put_late(measured, "r")
        for queue, take, is_foreign in (
            (own, overflow, False),
            (own, RequestQueue.take_batch, False),
            (other, overflow, True),
            (own, RequestQueue.take_batch, True),
        ):
            (claim,) = take(queue, ROOM)
            assert (claim.is_foreign, claim.turn) == (is_foreign, None)
            queue.release([held(claim)])

    def test_beside_tenants(self, client: Any, measured: RequestQueue) -> None:
        _, other = self.queues(client)
        put_late(measured, "r", tenant="t")
        (claim,) = overflow(other)
        assert claim.is_foreign
        assert claim.turn
        assert (claim.tenant, claim.weight) == ("t", 1.0)

    def test_exact_streams_stay(self, client: Any, measured: RequestQueue) -> None:
        own, other = self.queues(client)
        put_late(measured, "exact", resume="exact_only")
        assert spilt(other) == []
        assert spilt(own) == ["exact"]

    def test_the_queue_keeps_its_model(self, client: Any, queue: RequestQueue) -> None:
        other = RequestQueue(client, model=OTHER)
        overflow(other)
        assert not client.exists(queue.keys.model)
        own, _ = self.queues(client)
        overflow(other)
        assert client.hget(queue.keys.model, "fingerprint") == b"own"
        assert own.take_batch(ROOM) == []


def test_overflow_workers_are_counted_apart(queue: RequestQueue) -> None:
    assert report(queue, "w1") == 1
    assert report(queue, "cloud", overflow=True) == 1
    assert report(queue, "w2") == 2, "they share the queue without the overflow worker"
    for overflow, expected in ((True, ["cloud"]), (False, ["w1", "w2"])):
        found = queue.run(lookups.live_worker_ids(queue.keys, 0, overflow=overflow))
        assert sorted(found) == expected
    cloud = WorkerStats(worker_id="cloud", overflow=True)
    assert queue.run(scripts.heartbeat(cloud, 0)) == 0


def test_a_cancel_before_during_and_after(measured: RequestQueue) -> None:
    put_late(measured, "before", "during", "after")
    assert measured.cancel("before") is CancelStatus.CANCELLED
    claims = {claim.request_id: claim for claim in overflow(measured)}
    assert claims.keys() == {"during", "after"}
    assert measured.cancel("during") is CancelStatus.FLAGGED
    rows = [row(claims["during"], 0), row(claims["after"], 0, reason=FinishReason.STOP)]
    assert measured.publish(rows).rows == [RowStatus.CANCELLED, RowStatus.OK]
    assert measured.cancel("after") is CancelStatus.FINISHED
    for request_id in ("before", "during", "after"):
        assert [event["finish_reason"] for event in log_of(measured, request_id)][-1]
        assert sum(bool(event["finish_reason"]) for event in log_of(measured, request_id)) == 1


def test_racing_claims_and_cancels_lose_nothing_and_repeat_nothing(
    client: Any, measured: RequestQueue
) -> None:
    """Workers of both kinds, which also give requests back in the middle, beside cancels."""
    rng = random.Random(seed := random.randrange(2**32))
    names = [f"r{number}" for number in range(200)]
    put_late(measured, *names)
    taken, is_over = Counter[bool](), threading.Event()

    def serve(number: int) -> None:
        mine, spills = random.Random(seed + number), number % 2 == 1
        model = OTHER if spills else OWN
        queue = RequestQueue(client, model=model, worker_id=f"w{number}", is_overflow=spills)
        while not is_over.is_set():
            claims = queue.take_batch(replace(ROOM, max_count=mine.randint(1, 4)))
            for claim in claims:
                taken[spills] += 1
                num_done = sum(len(event.token_ids) for event in claim.events)
                is_last = num_done >= 2 or mine.random() < 0.4
                reason = FinishReason.STOP if is_last else None
                (status,) = queue.publish([row(claim, num_done, f"{num_done} ", reason)]).rows
                assert status in (RowStatus.OK, RowStatus.CANCELLED)
                if not is_last:
                    queue.release([held(claim)])

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for name in rng.sample(names, 40):
        measured.cancel(name)
    until(lambda: client.zcard(measured.keys.deadlines) == 0)  # until all have ended
    is_over.set()
    for thread in threads:
        thread.join()
    assert min(taken.values()) > 0, f"seed {seed}"
    for name in names:
        log = log_of(measured, name)
        assert [bool(event["finish_reason"]) for event in log] == [False] * (len(log) - 1) + [True]
        text = "".join(event["text"] for event in log)
        assert text == "".join(f"{number} " for number in range(len(text) // 2)), f"seed {seed}"
    assert client.hgetall(measured.keys.backlog) == {}
