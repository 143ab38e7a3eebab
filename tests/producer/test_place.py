"""Where a request waits: the order in which claims take requests, and when one will start."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from promptq import Client
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts, statistics
from promptq.shared.queue.places import Place
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.queue.statistics import Contribution
from tests.producer.playing import HandWorker
from tests.support.requests import ROOM, new, put, put_plainly, row
from tests.support.servers import Server
from tests.support.waiting import until

NAMES = ("", "a", "b", "c")


@pytest.fixture
def queue(worker: HandWorker) -> RequestQueue:
    return worker.queue


def order_of_claims(queue: RequestQueue) -> list[str]:
    """Takes all requests, one a claim. Returns their ids."""
    ids: list[str] = []
    while claims := queue.take_batch(Room(1, 10**9)):
        ids += [claim.request_id for claim in claims]
    return ids


def fill(queue: RequestQueue, rng: random.Random, tenants: tuple[str, ...]) -> list[str]:
    """Changes a queue at random by all that may change who waits. Returns the waiting ids."""
    ids: list[str] = []
    for nth in range(30):
        action = rng.choice(["put", "put", "put", "plain", "claim", "cancel", "move", "delay"])
        fields = {"priority": rng.randint(-2, 2), "tenant": rng.choice(tenants) or None}
        if action == "put":
            ids.append(put(queue, f"{nth}", prompt="x" * rng.randint(1, 400), **fields))
        elif action == "plain":
            score = time.time() * 1000 - rng.randint(0, 90_000)
            put_plainly(queue.redis, queue, f"{nth}", score, '{"prompt":"a"}')
            ids.append(f"{nth}")
        elif action == "delay":
            put(queue, f"{nth}", delay_ms=3_600_000, **fields)
        elif action == "move" and ids:
            scores = {rng.choice(ids): time.time() * 1000}
            queue.redis.zadd(queue.keys.pending, scores, xx=True)
        elif action == "cancel" and ids:
            queue.cancel(ids.pop(rng.randrange(len(ids))))
        elif action == "claim":
            claims = queue.take_batch(Room(rng.randint(0, 2), 10**9))
            ids = [each for each in ids if each not in {claim.request_id for claim in claims}]
            if claims and rng.random() < 0.5:
                queue.release([Held(claims[0].request_id, claims[0].fence)])
                ids.append(claims[0].request_id)
    return ids


@pytest.mark.parametrize("tenants", [("",), ("a",), NAMES], ids=["plain", "one", "several"])
def test_a_place_is_the_number_of_claims_before_it(
    client: Client, queue: RequestQueue, tenants: tuple[str, ...], seed: int
) -> None:
    rng = random.Random(seed)
    ids = fill(queue, rng, tenants)
    places = {each: client.place(each) for each in ids}
    order = order_of_claims(queue)
    assert sorted(order) == sorted(ids)
    for nth, request_id in enumerate(order):
        found = places[request_id]
        assert found.state == "waiting"
        assert found.in_front is not None
        assert found.in_front >= nth
        if tenants == ("",):
            assert not found.at_most
        if not found.at_most:
            assert found.in_front == nth
        assert found.in_front < len(ids), "plain clients have no other tenant here"


def test_the_bound_holds_after_plain_clients_and_earlier_releases(
    client: Client, queue: RequestQueue
) -> None:
    """They count no requests of tenants, so a statistic counts them again."""
    put(queue, "own", tenant="own")
    for nth in range(5):
        queue.redis.zadd(f"{queue.keys.pending}:other", {f"{nth}": 1})
        queue.redis.sadd(queue.keys.tenants_waiting, "other")
    queue.run(statistics.sample(Contribution()))
    assert client.place("own").in_front == 5
    assert client.place("own").at_most
    put(queue, "6", tenant="third")
    assert client.place("own").in_front == 6
    assert client.place("6").in_front == 6


def test_with_affinity_later_requests_may_run_first(client: Client, queue: RequestQueue) -> None:
    queue.redis.hset(queue.keys.config, "affinity_ms", 500)
    for nth in range(40):
        put(queue, f"{nth:02}")
    assert [client.place(each).in_front for each in ("00", "30", "39")] == [32, 39, 39]
    assert client.place("39").at_most


def test_a_delayed_request_has_a_place_at_its_time(client: Client, queue: RequestQueue) -> None:
    put(queue, "late", delay_ms=30_000, priority=-2)
    put(queue, "first", priority=-1)
    put(queue, "second")
    found = client.place("late")
    assert (found.in_front, found.at_most) == (0, True)
    assert found.delayed_ms is not None
    assert 0 < found.delayed_ms <= 30_000
    assert "delayed for" in str(found)
    put(queue, "due", delay_ms=1, priority=-2)
    until(lambda: client.place("second").at_most)
    assert client.place("second").in_front == 2
    assert order_of_claims(queue) == ["due", "first", "second"]


def test_requests_that_do_not_wait(
    make_client: Callable[..., Any], server: Server, kind: str, queue: RequestQueue
) -> None:
    connect = server.connect if kind == "sync" else server.connect_async
    client = make_client(connect("producer"))
    with pytest.raises(RequestNotFoundError, match="no request 'unknown' is known"):
        client.place("unknown")
    put(queue, "r")
    [claim] = queue.take_batch(ROOM)
    assert client.place("r") == Place(RequestState.ACTIVE, "a worker holds the request")
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert client.place("r") == Place(RequestState.COMPLETED, "the request has ended")
    queue.redis.hset(queue.keys.request("half"), "payload", "{}")
    assert client.place("half") == Place(RequestState.WAITING, "the request is in no queue")


def test_tokens_in_front_are_those_of_the_tenants_mean_request(
    client: Client, queue: RequestQueue
) -> None:
    for nth in range(10):
        put(queue, f"{nth}", prompt="x" * 400, max_tokens=100, tenant="t")
    assert client.place("0").tokens_in_front == 0
    each = client.place("1").tokens_in_front
    assert each is not None
    assert each >= 200
    assert client.place("9").tokens_in_front == 9 * each


def test_the_start_is_unknown_without_a_worker_and_measured_with_one(
    client: Client, queue: RequestQueue
) -> None:
    for nth in range(9):
        put(queue, f"{nth}")
    found = client.place("8")
    assert (found.because, found.start_p50_ms) == ("no worker is alive", None)
    assert str(found).endswith("the start is unknown: no worker is alive")
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w"), 60_000))
    assert client.place("8").because == "no output was measured in the last minute"
    now_ms = int(time.time() * 1000)
    for seconds in (20, 15, 10):  # a worker ends 2 requests of 10 tokens a second
        fields = {"waiting": 9, "active": 4, "finished": 10, "tokens_per_second": "20.0"}
        queue.redis.xadd(queue.keys.statistics, fields, f"{now_ms - seconds * 1000}-0")
    found = client.place("8")
    assert (found.requests_per_second, found.tokens_per_second) == (2.0, 20.0)
    assert found.start_p50_ms is not None
    assert found.start_p95_ms is not None
    assert 4400 < found.start_p50_ms < 4600, "the ninth of two a second"
    assert 6000 < found.start_p95_ms < 9000
    assert str(found).endswith("starts in about 5 s, at 95% within 9 s")
    earlier = client.place("0").start_p50_ms
    assert earlier is not None
    assert earlier <= 500
    queue.redis.hset(queue.keys.config, "paused", 1)
    assert client.place("8").because == "the queue is paused"


def test_the_last_answers_do_not_stand_for_long_ones_that_run(
    client: Client, queue: RequestQueue
) -> None:
    """Few answers ended, all short. Then many long requests begin, and none has ended yet."""
    for nth in range(9):
        put(queue, f"{nth}", max_tokens=1000)
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w"), 60_000))
    now_ms = int(time.time() * 1000)
    queue.redis.lpush(f"{queue.keys.prefix}outputs", *[f"{now_ms} 10"] * 4)
    for seconds in (20, 15, 10):
        fields = {"waiting": 9, "active": 4, "finished": 0, "tokens_per_second": "1000.0"}
        queue.redis.xadd(queue.keys.statistics, fields, f"{now_ms - seconds * 1000}-0")
    found = client.place("8")
    assert found.start_p50_ms is not None
    assert found.start_p95_ms is not None
    assert 8000 < found.start_p50_ms < 10_000, "the ninth of one a second"
    assert found.start_p95_ms > 2 * found.start_p50_ms, "the lengths are a guess"


def test_among_tenants_half_of_all_starts_come_by_the_share(
    client: Client, queue: RequestQueue
) -> None:
    """The other tenant has more requests than come before this one, by the bound."""
    queue.enqueue([new(f"other{nth}", tenant="other") for nth in range(100)])
    queue.enqueue([new(f"{nth}", tenant="own") for nth in range(10)])
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w"), 60_000))
    fields = {"waiting": 110, "active": 4, "finished": 50, "tokens_per_second": "9"}
    queue.redis.xadd(queue.keys.statistics, fields, f"{int(time.time() * 1000) - 6000}-0")
    found = client.place("9")
    assert (found.in_front, found.at_most) == (109, True)
    assert found.start_p50_ms is not None
    assert found.start_p95_ms is not None
    assert 1500 < found.start_p50_ms < 2500, "10 of this tenant and 10 of the other, at 10 a second"
    assert found.start_p95_ms > 10_000
    queue.redis.hset(queue.keys.config, "weight:own", 4)
    heavier = client.place("9").start_p50_ms
    assert heavier is not None
    assert heavier < 1500


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_the_number_of_commands_does_not_grow(client: Client, queue: RequestQueue) -> None:
    def num_commands() -> int:
        client.place("r")  # the script is known
        queue.redis.config_resetstat()
        client.place("r")
        stats = queue.redis.info("commandstats")
        return sum(each["calls"] for name, each in stats.items() if "config" not in name)

    for nth in range(10):
        put(queue, f"{nth}", tenant="t")
        put(queue, f"u{nth}", tenant="u")
    put(queue, "r", tenant="t")
    few = num_commands()
    queue.enqueue([new(f"more{nth}", tenant="t") for nth in range(1000)])
    assert num_commands() == few
    queue.enqueue([new(f"of{nth}", tenant=f"tenant{nth}") for nth in range(100)])
    assert num_commands() <= few + 1, "SCARD counts the tenants beyond the sample"
    assert client.place("r").in_front == 10 + 10 + 100
