"""Quotes: when a request would start and end, and requests that refuse to be late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from promptq import Client
from promptq.producer.clients.request_builder import compose
from promptq.shared.errors import DeadlineRefusedError, InvalidRequestError
from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.places import Quote
from promptq.shared.queue.request_queue import RequestQueue
from tests.producer.gateway.living import error_of, live_gateway
from tests.producer.playing import HandWorker
from tests.support.requests import new, put
from tests.support.roles import as_role
from tests.support.servers import Server

NUM_RUNNING = 4
ROOM = Room(NUM_RUNNING, 10**9)
LATE = {"deadline_ms": 3000, "deadline_policy": "refuse"}
"""Fields of a request that is late behind `NUM_WAITING` others."""
NUM_WAITING = 9


@pytest.fixture
def queue(worker: HandWorker) -> RequestQueue:
    return worker.queue


def measure(queue: RequestQueue, *, waiting: int = NUM_WAITING, **fields: Any) -> None:
    """Adds statistics: one worker ends 2 requests a second, each with 10 tokens. It runs 4 requests
    at once, each for 2 s."""
    stats = WorkerStats(worker_id="w", max_num_seqs=NUM_RUNNING, mean_generation_ms=2000)
    queue.run(scripts.heartbeat(stats, 60_000))
    now_ms = int(time.time() * 1000)
    counts = {"waiting": waiting, "active": NUM_RUNNING, "running": NUM_RUNNING, "workers": 1}
    for seconds in (20, 15, 10):
        sample = {**counts, "finished": 10, "tokens_per_second": "20.0", **fields}
        queue.redis.xadd(queue.keys.statistics, sample, f"{now_ms - seconds * 1000}-0")
    queue.redis.lpush(f"{queue.keys.prefix}outputs", *[f"{now_ms} 10"] * 20)


def be_full(queue: RequestQueue) -> None:
    """Lets a worker take as many requests as it can, and more wait."""
    queue.enqueue([new(f"{nth}") for nth in range(NUM_RUNNING + NUM_WAITING)])
    assert len(queue.take_batch(ROOM)) == NUM_RUNNING
    measure(queue)


def times_of(quote: Quote) -> list[int]:
    times = [quote.start_p50_ms, quote.start_p95_ms, quote.end_p50_ms, quote.end_p95_ms]
    return [ms for ms in times if ms is not None]


def test_a_quote_says_where_a_request_would_wait_and_when_it_would_end(
    make_client: Callable[..., Any], server: Server, kind: str, queue: RequestQueue
) -> None:
    connect = server.connect if kind == "sync" else server.connect_async
    client = make_client(connect("producer"))
    be_full(queue)
    quote = client.quote({"prompt": "Once"})
    assert (quote.in_front, quote.at_most) == (NUM_WAITING, False)
    start, late_start, end, late_end = times_of(quote)
    assert 4900 < start <= 5000 < late_start, "10 ends, at 2 a second"
    assert end == pytest.approx(start + 2000, rel=0.1), "10 tokens, at 5 a second"
    assert late_end == pytest.approx(late_start + 2000, rel=0.1)
    assert str(quote).endswith("ends in about 7 s, at 95% within 11 s")
    bounded = client.quote({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    assert end - times_of(bounded)[2] == pytest.approx(1000, abs=50), "5 tokens less"
    embedding = client.quote({"prompt": "Once", "embed": {}})
    assert times_of(embedding)[2] < times_of(bounded)[2]
    delayed = client.quote({"prompt": "Once", "delay_ms": 60_000})
    assert (delayed.delayed_ms, delayed.at_most) == (60_000, True)
    assert times_of(delayed)[2] == pytest.approx(60_000 + end, abs=10)
    first = client.quote({"prompt": "Once", "priority": -1})
    assert first.in_front == 0
    assert times_of(first)[2] < end


def test_a_quote_is_the_place_of_the_enqueued_request(client: Client, queue: RequestQueue) -> None:
    be_full(queue)
    for fields in ({}, {"priority": -2}, {"priority": 3}, {"tenant": "t"}):
        payload = {"prompt": "Once", **fields}
        quote, place = client.quote(payload), client.place(client.enqueue(**payload))
        names = ("in_front", "at_most", "requests_per_second", "start_p50_ms", "start_p95_ms")
        for name in names:
            assert getattr(quote, name) == getattr(place, name), (fields, name)


def test_a_request_starts_at_once_while_a_worker_has_room(
    client: Client, queue: RequestQueue
) -> None:
    measure(queue, waiting=0)
    for nth in range(NUM_RUNNING):
        start, late_start, end, _ = times_of(client.quote({"prompt": "Once"}))
        assert (start, late_start, end) == (0, 0, 2000)
        put(queue, f"{nth}")
    assert times_of(client.quote({"prompt": "Once"}))[0] > 0
    assert len(queue.take_batch(ROOM)) == NUM_RUNNING
    assert times_of(client.quote({"prompt": "Once"}))[0] > 0
    several = compose({"prompt": "Once"} for _ in range(3))
    assert client.quote_composed(several).in_front == 2


def test_the_first_burst_is_quoted_by_the_speed_that_workers_report(
    client: Client, queue: RequestQueue
) -> None:
    """Requests that came one by one do not show how many a worker can end."""
    measure(queue, waiting=0, active=0, running=0, finished=1, tokens_per_second="2.0")
    request = {"prompt": "Once", "max_tokens": 10}
    quotes = []
    for _ in range(NUM_RUNNING + NUM_WAITING):
        quotes.append(times_of(client.quote(request)))
        client.enqueue(**request)
    assert all(quote[:3] == [0, 0, 2000] for quote in quotes[:NUM_RUNNING])
    start, late_start, end, late_end = quotes[-1]
    assert 3000 < start < 6000, "9 ends, at 2 a second, with `Once` as part of the length"
    assert start < late_start < late_end < 40_000, "full workers are slower"
    assert end == pytest.approx(start + 2500, abs=1000)
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w", max_num_seqs=NUM_RUNNING), 60_000))
    unknown = client.quote(request)
    assert (times_of(unknown), unknown.because) == ([], "no worker has reported its speed yet")


def test_a_guess_of_the_output_moves_the_end_if_guesses_were_right(
    client: Client, queue: RequestQueue
) -> None:
    measure(queue, waiting=0)
    queue.redis.hset(queue.keys.config, "shortest_first_ms", 1000)
    guesses = f"{queue.keys.prefix}statistics:guesses"

    def end_of(expected_tokens: int) -> int | None:
        return client.quote({"prompt": "Once", "expected_tokens": expected_tokens}).end_p50_ms

    queue.redis.lpush(guesses, *[f"{nth} {nth}" for nth in range(1, 21)])
    assert (end_of(5), end_of(10), end_of(20)) == (1000, 2000, 4000)
    queue.redis.delete(guesses)
    queue.redis.lpush(guesses, *[f"{nth} {21 - nth}" for nth in range(1, 21)])
    assert (end_of(5), end_of(20)) == (2000, 2000), "guesses were wrong"


def test_times_are_unknown_without_a_worker_or_a_measurement(
    client: Client, queue: RequestQueue
) -> None:
    def because() -> str:
        quote = client.quote({"prompt": "Once"})
        assert times_of(quote) == []
        assert str(quote).endswith(f"the start is unknown: {quote.because}")
        client.enqueue("Once", **LATE)  # nobody knows whether it will be late
        return quote.because

    assert because() == "no worker is alive"
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w"), 60_000))
    assert because() == "no output was measured in the last minute"
    be_full(queue)
    queue.redis.hset(queue.keys.config, "paused", 1)
    assert because() == "the queue is paused"
    queue.redis.hdel(queue.keys.config, "paused")
    queue.redis.delete(queue.keys.statistics)
    measure(queue, running=0)
    quote = client.quote({"prompt": "Once"})
    assert len(times_of(quote)) == 2
    assert quote.because == "no speed of running requests was measured in the last minute"


def test_a_request_is_refused_if_it_would_be_late(client: Client, queue: RequestQueue) -> None:
    be_full(queue)
    before = queue.redis.dbsize()
    with pytest.raises(DeadlineRefusedError, match="'late' would probably end in ") as raised:
        client.enqueue("Once", request_id="late", **LATE)
    quote = raised.value.quote
    assert quote == client.quote({"prompt": "Once", **LATE})
    assert quote.end_p50_ms > LATE["deadline_ms"]
    assert client.state("late") is None
    assert queue.redis.dbsize() == before, "nothing of it is kept"
    with pytest.raises(DeadlineRefusedError):
        client.enqueue_many([{"prompt": "other"}, {"prompt": "Once", **LATE}])
    assert client.quote({"prompt": "Once"}).in_front == NUM_WAITING, "all were refused"
    client.enqueue("Once", deadline_ms=3000)
    client.enqueue("Once", request_id="soon", **{**LATE, "deadline_ms": 60_000})
    client.enqueue("Once", request_id="urgent", priority=-2, **LATE)
    with pytest.raises(InvalidRequestError, match="deadline_policy: needs deadline_ms or"):
        client.quote({"prompt": "Once", "deadline_policy": "refuse"})


def test_a_call_counts_its_earlier_requests(client: Client, queue: RequestQueue) -> None:
    measure(queue)
    request = {"prompt": "Once", **LATE}
    with pytest.raises(DeadlineRefusedError):
        client.enqueue_many([request] * (NUM_RUNNING + 10))
    assert len(client.enqueue_many([request] * NUM_RUNNING)) == NUM_RUNNING


def test_a_retry_of_an_accepted_request_is_not_refused(client: Client, queue: RequestQueue) -> None:
    once = {"idempotency_key": "once", **LATE}
    accepted = client.enqueue("Once", **once)
    requests = compose([{"prompt": "Once", "request_id": "sent", **LATE}])
    assert queue.run(scripts.enqueue(requests, 60_000, "nonce")) == ["sent"]
    be_full(queue)
    assert client.enqueue("Once", **once) == accepted
    assert queue.run(scripts.enqueue(requests, 60_000, "nonce")) == ["sent"], "a lost reply"
    with pytest.raises(DeadlineRefusedError):
        client.enqueue("Once", **{**once, "idempotency_key": "other"})


def test_a_tenant_is_quoted_its_share(client: Client, queue: RequestQueue) -> None:
    be_full(queue)
    put(queue, "own", tenant="own")
    quote = client.quote({"prompt": "Once", "tenant": "own"})
    assert (quote.in_front, quote.at_most) == (NUM_WAITING + 1, True)
    start, late_start, end, late_end = times_of(quote)
    assert start < 2500, "every second turn"
    assert end < 4500
    assert late_end > late_start > 5500, "all others may be first"
    client.enqueue("Once", tenant="own", **{**LATE, "deadline_ms": 5000})
    with pytest.raises(DeadlineRefusedError):
        client.enqueue("Once", **LATE)


@pytest.mark.parametrize(
    "records",
    [
        {"finished": "nan", "tokens_per_second": "inf"},
        {"running": "-5", "active": "x"},
        {"running": "1e300", "workers": "1e15"},
        {"finished": "1e15", "tokens_per_second": "1e15", "running": "1e15"},
    ],
)
def test_strange_records_make_no_error(
    client: Client, queue: RequestQueue, records: dict[str, str]
) -> None:
    be_full(queue)
    queue.redis.delete(queue.keys.statistics)
    measure(queue, **records)
    queue.redis.lpush(f"{queue.keys.prefix}outputs", "x", "1 99999999999999999999", "2 0", "")
    assert client.quote({"prompt": "Once"}).in_front == NUM_WAITING
    for name in ("outputs", "workers", "statistics", "backlog"):
        key = f"{queue.keys.prefix}{name}"
        queue.redis.delete(key)
        queue.redis.set(key, "no list")
    assert client.quote({"prompt": "Once"}).in_front == NUM_WAITING


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"prompt": "Once", "deadline_policy": "perhaps", "deadline_ms": 5},
        {"prompt": "Once", "max_tokens": -1},
        {"prompt": "Once", "tenant": "no tenant"},
        {"prompt": "Once", "delay_ms": 2**60},
        {"prompt": "\ud800"},
        {"prompt": "Once", "metadata": {"max_tokens": float("nan")}, "unknown": 1},
    ],
)
def test_a_wrong_payload_is_refused_by_its_field(client: Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        client.quote(wrong)


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_quotes_and_refusals_over_http(server: Server, redis_url: str, queue: RequestQueue) -> None:
    with (
        live_gateway(as_role("gateway", redis_url), http_header_seconds=0.05) as gateway,
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
    ):
        unknown = http.post("/v1/quote", json=CHAT).json()
        assert (unknown["end_p95_ms"], unknown["because"]) == (None, "no worker is alive")
        be_full(queue)
        quote = http.post("/v1/quote", json=CHAT).json()
        assert (quote["object"], quote["in_front"]) == ("quote", NUM_WAITING)
        assert quote["start_p50_ms"] < quote["end_p50_ms"] < quote["end_p95_ms"]
        several = http.post("/v1/quote", json={"prompt": ["Hi", "Ho"], "n": 2}).json()
        assert several["in_front"] == NUM_WAITING + 3
        refused = http.post("/v1/chat/completions", json={**CHAT, **LATE})
        assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("deadline", "deadline_ms")
        assert error["quote"]["end_p50_ms"] > LATE["deadline_ms"]
        large = http.post("/v1/completions", json={"prompt": "x" * 70_000, **LATE})
        assert error_of(large) == (409, "deadline"), "another process reads it"
        message = {"max_tokens": 9, "messages": CHAT["messages"], **LATE}
        of_messages = http.post("/v1/messages", json=message).json()["error"]["details"]
        assert (of_messages["error_code"], of_messages["quote"]["in_front"]) == ("deadline", 9)
        wrong = http.post("/v1/quote", json={"prompt": "Hi", "deadline_policy": "refuse"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "deadline_policy")
        assert http.post("/v1/quote", content=b"[]").status_code == 400
        assert queue.redis.zcard(queue.keys.pending) == NUM_WAITING


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_a_repeated_call_gets_the_accepted_stream(
    server: Server, redis_url: str, queue: RequestQueue
) -> None:
    call = {**CHAT, **LATE, "idempotency_key": "once", "detach": True}
    with (
        live_gateway(as_role("gateway", redis_url), http_header_seconds=0.05) as gateway,
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
    ):
        ids = []
        for _ in range(2):
            with http.stream("POST", "/v1/chat/completions", json=call) as response:
                assert response.status_code == 200
                ids.append(response.headers["X-Request-Id"])
            if len(ids) == 1:
                be_full(queue)
        assert ids[0] == ids[1]
        other = http.post("/v1/chat/completions", json={**call, "idempotency_key": "other"})
        assert error_of(other) == (409, "deadline")
