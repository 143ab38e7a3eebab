"""The queue's contract, on every kind of server."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shared import scripts
from shared.errors import (
    InvalidRequestError,
    ModelMismatchError,
    QueueClosedError,
    QueueFullError,
    RequestExistsError,
    RequestNotFoundError,
)
from shared.request_queue import AsyncRequestQueue, RequestQueue, new_request_id
from shared.schemas import FinishReason, Request, RequestState, TokenEvent, Usage
from shared.scripts import (
    CancelStatus,
    Claim,
    Held,
    ModelIdentity,
    NewRequest,
    Room,
    Row,
    RowStatus,
)
from tests.helpers import Server

ROOM = Room(max_count=1000, token_budget=10**9)


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    client = server.connect()
    yield client
    client.close()


@pytest.fixture
def queue(client: Any) -> RequestQueue:
    return RequestQueue(client, worker_id="w1")


def new(request_id: str = "", *, delay_ms: int = 0, **fields: Any) -> NewRequest:
    fields.setdefault("prompt", "hello")
    return NewRequest(request_id or new_request_id(), Request.build(fields), delay_ms)


def put(queue: RequestQueue, request_id: str = "", **fields: Any) -> str:
    return queue.enqueue([new(request_id, **fields)])[0]


def put_plainly(
    client: Any, queue: RequestQueue, request_id: str, score: float, payload: str
) -> None:
    """Enqueue with nothing but the protocol's plain commands."""
    client.hset(queue.keys.request(request_id), "payload", payload)
    client.zadd(queue.keys.pending, {request_id: score})
    client.publish(queue.keys.control, "pending")


def event(index: int, text: str = "x", reason: FinishReason | None = None) -> TokenEvent:
    tokens = [] if reason in (FinishReason.CANCELLED, FinishReason.ERROR) else [7]
    usage = Usage(prompt_tokens=3, completion_tokens=index + len(tokens)) if reason else None
    return TokenEvent(
        index=index, token_ids=tokens, text=text if tokens else "", finish_reason=reason,
        attempt=1, usage=usage,
    )  # fmt: skip


def row(claim: Claim, index: int, text: str = "x", reason: FinishReason | None = None) -> Row:
    return Row(claim.request_id, claim.fence, event(index, text, reason))


def held(claim: Claim) -> Held:
    return Held(claim.request_id, claim.fence)


def log_of(client: Any, queue: RequestQueue, request_id: str) -> list[tuple[str, dict[str, Any]]]:
    entries = client.xrange(queue.keys.tokens(request_id))
    return [(at.decode(), json.loads(fields[b"event"])) for at, fields in entries]


def last_event(client: Any, queue: RequestQueue, request_id: str) -> dict[str, Any]:
    return log_of(client, queue, request_id)[-1][1]


def ids(claims: list[Claim]) -> list[str]:
    return [claim.request_id for claim in claims]


# --- order


def test_hands_out_by_priority_and_first_in_first_out_within_one(queue: RequestQueue) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    put_in = [(rng.choice([-1000, -5, 0, 3, 1000]), n) for n in range(60)]
    for priority, n in put_in:
        put(queue, f"{n:03}", priority=priority)
    expected = [f"{n:03}" for _, n in sorted(put_in)]
    assert ids(queue.take_batch(ROOM)) == expected


def test_many_enqueued_at_once_keep_their_order(queue: RequestQueue) -> None:
    """Ids are UUIDv7, so that equal scores fall back to the order of enqueueing."""
    batch = [new() for _ in range(100)]
    assert queue.enqueue(batch) == ids(queue.take_batch(ROOM))


def test_aging_lets_a_level_overtake_for_a_minute_only(client: Any, queue: RequestQueue) -> None:
    now = int(time.time() * 1000)
    put_plainly(client, queue, "older by two minutes", now - 120_000, '{"prompt":"a"}')
    urgent = put(queue, priority=-1)
    more_urgent = put(queue, priority=-5)
    put_plainly(client, queue, "x-older-by-two-minutes", now - 120_000, '{"prompt":"a"}')
    taken = ids(queue.take_batch(ROOM))
    assert taken == [more_urgent, "x-older-by-two-minutes", urgent]


def test_strict_priority_never_lets_time_win(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "strict_priority", "1")
    lazy = [put(queue, priority=1000), put(queue, priority=999)]
    urgent = [put(queue, priority=-1000), put(queue, priority=-999)]
    assert ids(queue.take_batch(ROOM)) == [*urgent, *reversed(lazy)]


def test_a_score_keeps_every_millisecond_at_the_widest_level(
    client: Any, queue: RequestQueue
) -> None:
    client.hset(queue.keys.config, "strict_priority", "1")
    put(queue, "a", priority=-1000)
    score = client.zscore(queue.keys.pending, "a")
    assert score == int(score)
    assert abs(score + 1000 * 2**41 - time.time() * 1000) < 60_000


# --- room


def test_takes_no_more_than_the_count(queue: RequestQueue) -> None:
    queue.enqueue([new() for _ in range(10)])
    assert len(queue.take_batch(Room(max_count=4, token_budget=10**9))) == 4
    assert queue.count() == 6


def test_takes_no_more_than_the_token_budget(queue: RequestQueue) -> None:
    """Cost is prompt plus expected output: 10 tokens of output and a few of prompt here."""
    queue.enqueue([new(max_tokens=10) for _ in range(10)])
    claims = queue.take_batch(Room(max_count=100, token_budget=100))
    assert sum(claim.cost for claim in claims) <= 100
    assert 100 - sum(claim.cost for claim in claims) < claims[0].cost


def test_counts_exact_prompt_tokens_once_they_are_known(queue: RequestQueue) -> None:
    put(queue, "a", prompt="a long text " * 100, max_tokens=10)
    (claim,) = queue.take_batch(ROOM)
    assert claim.prompt_tokens is None
    assert claim.cost > 200
    queue.publish([], [Held("a", claim.fence, prompt_tokens=17)])
    queue.release([held(claim)])
    (claim,) = queue.take_batch(ROOM)
    assert (claim.prompt_tokens, claim.cost) == (17, 27)


def test_expects_the_measured_p90_of_output_where_max_tokens_is_loose(queue: RequestQueue) -> None:
    queue.enqueue([new() for _ in range(20)])
    for n, claim in enumerate(queue.take_batch(ROOM)):
        length = 5 if n < 18 else 50  # 9 of 10 have at most 5
        finished = TokenEvent(
            index=0, token_ids=[1] * length, text="", finish_reason=FinishReason.STOP
        )
        queue.publish([Row(claim.request_id, claim.fence, finished)])
    put(queue, prompt="abcd" * 3, max_tokens=4000)
    (claim,) = queue.take_batch(ROOM)
    assert claim.cost < 5 + 20


def test_what_is_too_large_for_the_whole_worker_still_goes_to_an_empty_one(
    queue: RequestQueue,
) -> None:
    put(queue, "huge", prompt="word " * 10_000)
    small = Room(max_count=8, token_budget=512, capacity=512)
    assert ids(queue.take_batch(small)) == ["huge"]


def test_an_oversized_head_is_overtaken_only_so_often(queue: RequestQueue) -> None:
    put(queue, "big", prompt="word " * 400, max_tokens=1)
    small = [put(queue, max_tokens=1) for _ in range(40)]
    overtaken = 0
    while claims := queue.take_batch(Room(max_count=1, token_budget=100)):
        assert claims[0].request_id in small
        overtaken += 1
    assert 0 < overtaken < 20, "room must be kept for the big one in the end"
    assert ids(queue.take_batch(Room(max_count=1, token_budget=1000))) == ["big"]


def test_an_urgent_request_counts_what_it_may_preempt_as_room(queue: RequestQueue) -> None:
    put(queue, "same", priority=0, max_tokens=10)
    full = Room(max_count=0, token_budget=0, capacity=1000, preemptible=[(0, 500), (5, 10)])
    assert queue.take_batch(full) == [], "it would preempt equals, or find too few tokens"
    put(queue, "urgent", priority=-1, max_tokens=10)
    assert ids(queue.take_batch(full)) == ["urgent"]


# --- take


def test_take_waits_for_a_request(queue: RequestQueue, server: Server) -> None:
    other = RequestQueue(server.connect())
    timer = threading.Timer(0.2, lambda: put(other, "late"))
    timer.start()
    claim = queue.take(timeout=20)
    timer.join()
    assert claim is not None
    assert claim.request_id == "late"


def test_take_gives_up_after_its_timeout(queue: RequestQueue) -> None:
    started = time.monotonic()
    assert queue.take(timeout=0.2) is None
    assert time.monotonic() - started >= 0.2


def test_take_can_be_aborted(queue: RequestQueue) -> None:
    abort = threading.Event()
    threading.Timer(0.1, abort.set).start()
    assert queue.take(abort=abort) is None


def test_close_ends_a_take_and_refuses_further_use(queue: RequestQueue) -> None:
    threading.Timer(0.1, queue.close).start()
    with pytest.raises(QueueClosedError, match="default"):
        queue.take()
    with pytest.raises(QueueClosedError):
        queue.count()


def test_no_request_goes_to_two_of_many_workers(server: Server) -> None:
    """Concurrent producers and workers: each request is claimed once."""
    taken: list[str] = []
    put_in: list[str] = []
    done = threading.Event()

    def produce() -> None:
        queue = RequestQueue(server.connect())
        put_in.extend(put(queue) for _ in range(50))

    def work() -> None:
        queue = RequestQueue(server.connect())
        while not (done.is_set() and queue.is_empty()):
            taken.extend(ids(queue.take_batch(Room(max_count=3, token_budget=10**6))))

    workers = [threading.Thread(target=work) for _ in range(3)]
    producers = [threading.Thread(target=produce) for _ in range(3)]
    for thread in workers + producers:
        thread.start()
    for thread in producers:
        thread.join()
    done.set()
    for thread in workers:
        thread.join()
    assert sorted(taken) == sorted(put_in)
    assert len(put_in) == 150


# --- state and inspection


def test_contains_count_and_empty_follow_the_queue(queue: RequestQueue) -> None:
    assert queue.is_empty()
    assert not queue.contains("a")
    assert queue.state("a") is None
    put(queue, "a")
    assert queue.contains("a")
    assert queue.count() == 1
    assert queue.state("a") is RequestState.WAITING
    queue.take_batch(ROOM)
    assert not queue.contains("a")
    assert queue.is_empty()
    assert queue.state("a") is RequestState.ACTIVE


def test_an_id_can_be_used_once(queue: RequestQueue) -> None:
    put(queue, "a")
    with pytest.raises(RequestExistsError, match="'a'"):
        put(queue, "a")


def test_a_batch_goes_in_whole_or_not_at_all(queue: RequestQueue) -> None:
    put(queue, "taken")
    with pytest.raises(RequestExistsError):
        queue.enqueue([new("fresh"), new("taken")])
    assert not queue.contains("fresh")


@pytest.mark.parametrize("bad", ["", "with space", "é", "a" * 201, "new\nline"])
def test_refuses_ids_that_no_key_should_hold(queue: RequestQueue, bad: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^id: "):
        queue.enqueue([NewRequest(bad, Request.build({"prompt": "a"}))])


def test_the_same_idempotency_key_gives_the_same_request(queue: RequestQueue) -> None:
    first = put(queue, idempotency_key="order-1")
    again = put(queue, idempotency_key="order-1")
    other = put(queue, idempotency_key="order-2")
    assert first == again != other
    assert queue.count() == 2


def test_a_full_queue_says_when_to_come_back(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "max_pending", "2")
    put(queue)
    put(queue)
    with pytest.raises(QueueFullError) as caught:
        put(queue)
    assert caught.value.retry_after_ms > 0
    assert queue.count() == 2


def test_a_delayed_request_waits_for_its_time(queue: RequestQueue) -> None:
    put(queue, "later", delay_ms=150)
    assert queue.take_batch(ROOM) == []
    time.sleep(0.2)
    assert ids(queue.take_batch(ROOM)) == ["later"]


def test_a_paused_queue_takes_in_and_hands_out_nothing(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "paused", "1")
    put(queue, "a")
    assert queue.take_batch(ROOM) == []
    client.hset(queue.keys.config, "paused", "0")
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_a_worker_of_another_model_does_not_touch_the_queue(client: Any) -> None:
    one = RequestQueue(client, model=ModelIdentity("llama", "abc"))
    other = RequestQueue(client, model=ModelIdentity("qwen", "def"))
    put(one, "a")
    assert one.take_batch(Room(max_count=0, token_budget=0)) == []
    with pytest.raises(ModelMismatchError, match=r"'llama'.*'qwen'"):
        other.take_batch(ROOM)
    assert ids(one.take_batch(ROOM)) == ["a"]


# --- publish


def test_publishes_to_log_and_channel_and_finishes(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(queue.keys.events("a"))
        channel.get_message(timeout=1)
        rows = [row(claim, 0, "Hé"), row(claim, 1, " 🦊", FinishReason.STOP)]
        assert queue.publish(rows).rows == [RowStatus.OK, RowStatus.OK]
        live = [channel.get_message(timeout=5)["data"].decode() for _ in rows]
    assert [at for at, _ in log_of(client, queue, "a")] == ["1-0", "2-1"]
    assert live == [entry.event.to_json() for entry in rows]
    assert queue.state("a") is RequestState.COMPLETED
    record = queue.run(scripts.record(queue.keys, "a"))
    result = json.loads(record["result"])
    assert result["text"] == "Hé 🦊"
    assert result["token_ids"] == [7, 7]
    assert result["finish_reason"] == "stop"
    assert json.loads(record["last_event"]) == json.loads(live[-1])
    assert client.zcard(queue.keys.leases) == 0
    assert 0 < client.pttl(queue.keys.tokens("a")) <= 60_000
    assert 60_000 < client.pttl(queue.keys.request("a")) <= 3_600_000


def test_a_row_is_written_once_however_often_it_is_sent(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.OK]
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.DUPLICATE]
    assert queue.publish([row(claim, 2)]).rows == [RowStatus.GAP]
    last = row(claim, 1, reason=FinishReason.LENGTH)
    assert queue.publish([last]).rows == [RowStatus.OK]
    assert queue.publish([last]).rows == [RowStatus.FINISHED]
    assert [at for at, _ in log_of(client, queue, "a")] == ["1-0", "2-1"]


def test_a_row_that_is_refused_does_not_stop_the_others(client: Any, queue: RequestQueue) -> None:
    for name in "abcde":
        put(queue, name)
    a, b, c, d, e = queue.take_batch(ROOM)
    queue.publish([row(b, 0)])
    queue.cancel("d")
    queue.release([held(e)])
    statuses = queue.publish(
        [row(a, 0), row(b, 0), row(c, 5), row(d, 0), row(e, 0), row(b, 1)]
    ).rows
    assert statuses == ["ok", "duplicate", "gap", "cancelled", "fenced", "ok"]
    assert len(log_of(client, queue, "a")) == 1
    assert len(log_of(client, queue, "b")) == 2


def test_an_earlier_attempt_is_fenced_off(client: Any) -> None:
    """A zombie's writes are refused and change nothing."""
    quick = RequestQueue(client, worker_id="zombie", lease_ms=100)
    other = RequestQueue(client, worker_id="heir")
    put(quick, "a")
    (old,) = quick.take_batch(ROOM)
    quick.publish([row(old, 0, "one")])
    time.sleep(0.15)
    assert other.reap().returned == 1
    (fresh,) = other.take_batch(ROOM)
    assert fresh.attempt == 2
    assert [item.text for item in fresh.events] == ["one"]
    assert quick.publish([row(old, 1, "no")], [held(old)]).rows == [RowStatus.FENCED]
    assert quick.publish([], [held(old)]).held == [RowStatus.FENCED]
    assert quick.release([held(old)]) == ["fenced"]
    assert other.publish([row(fresh, 1, "two", FinishReason.STOP)]).rows == [RowStatus.OK]
    assert [item["text"] for _, item in log_of(client, quick, "a")] == ["one", "two"]


def test_leases_are_renewed_for_all_that_is_held(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=400)
    put(queue, "kept", priority=-1)
    put(queue, "forgotten")
    kept, _forgotten = queue.take_batch(ROOM)
    for _ in range(4):
        time.sleep(0.15)
        assert queue.publish([], [held(kept)]).held == [RowStatus.OK]
    assert queue.reap().returned == 1
    assert queue.state("kept") is RequestState.ACTIVE
    assert queue.state("forgotten") is RequestState.WAITING


def test_a_seed_is_given_once_and_kept(queue: RequestQueue) -> None:
    put(queue, "a")
    (first,) = queue.take_batch(ROOM)
    queue.release([held(first)])
    (second,) = queue.take_batch(ROOM)
    assert first.seed == second.seed
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.fence != second.fence


def test_seeds_can_be_made_reproducible(client: Any) -> None:
    seeds = []
    for _ in range(2):
        client.flushall()
        queue = RequestQueue(client, seed=1)
        put(queue, "a")
        put(queue, "b")
        seeds.append([claim.seed for claim in queue.take_batch(ROOM)])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


def test_release_brings_back_the_old_place_and_the_progress(queue: RequestQueue) -> None:
    put(queue, "a")
    put(queue, "b")
    a, b = queue.take_batch(ROOM)
    queue.publish([row(b, 0, "so far")])
    assert queue.release([held(b), held(a)]) == ["waiting", "waiting"]
    assert queue.state("a") is RequestState.WAITING
    claims = queue.take_batch(ROOM)
    assert ids(claims) == ["a", "b"]
    assert [item.text for item in claims[1].events] == ["so far"]


def test_large_numbers_stay_exact(client: Any, queue: RequestQueue) -> None:
    """Token ids beyond 14 digits' rounding and empty lists survive a fold by the server."""
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    first = TokenEvent(index=0, token_ids=[2**31 - 1], text='"\\/\n\x7f', attempt=1)
    queue.publish([Row("a", claim.fence, first)])
    queue.cancel("a")
    queue.publish([], [held(claim)])
    result = json.loads(queue.run(scripts.record(queue.keys, "a"))["result"])
    assert result["token_ids"] == [2**31 - 1]
    assert result["text"] == '"\\/\n\x7f'
    put(queue, "b")
    queue.cancel("b")
    assert json.loads(queue.run(scripts.record(queue.keys, "b"))["result"])["token_ids"] == []


# --- cancel, remove, clear


def test_cancelling_a_waiting_request_ends_it_at_once(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    assert queue.cancel("a") is CancelStatus.CANCELLED
    assert queue.take_batch(ROOM) == []
    assert queue.state("a") is RequestState.CANCELLED
    assert last_event(client, queue, "a")["finish_reason"] == "cancelled"
    assert queue.cancel("a") is CancelStatus.FINISHED
    assert queue.cancel("never") is CancelStatus.UNKNOWN
    assert len(log_of(client, queue, "a")) == 1


def test_cancelling_a_running_request_ends_it_with_its_next_row(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)], [Held("a", claim.fence, prompt_tokens=3)])
    assert queue.cancel("a") is CancelStatus.FLAGGED
    assert queue.publish([row(claim, 1)]).rows == [RowStatus.CANCELLED]
    entries = log_of(client, queue, "a")
    assert [at for at, _ in entries] == ["1-0", "1-1"]
    assert entries[-1][1]["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0,
    }  # fmt: skip
    assert queue.publish([row(claim, 1)]).rows == [RowStatus.FINISHED]


def test_the_flag_alone_cancels(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "waiting", 1, '{"prompt":"a"}')
    put_plainly(client, queue, "running", 0, '{"prompt":"a"}')
    (claim,) = queue.take_batch(Room(max_count=1, token_budget=10**6))
    for name in ("waiting", "running"):
        client.hset(queue.keys.request(name), "cancelled", "1")
    assert queue.take_batch(ROOM) == []
    assert queue.publish([], [held(claim)]).held == [RowStatus.CANCELLED]
    for name in ("waiting", "running"):
        assert last_event(client, queue, name)["finish_reason"] == "cancelled"


def test_remove_takes_out_what_waits_only(queue: RequestQueue) -> None:
    put(queue, "waits", priority=1)
    put(queue, "runs")
    queue.take_batch(Room(max_count=1, token_budget=10**6))
    assert queue.remove("waits")
    assert not queue.remove("runs")
    assert not queue.remove("never")
    assert queue.state("runs") is RequestState.ACTIVE
    assert queue.is_empty()


def test_clear_removes_all_that_wait(client: Any, queue: RequestQueue) -> None:
    put(queue, "runs")
    queue.take_batch(ROOM)
    queue.enqueue([new() for _ in range(1200)])
    put(queue, "later", delay_ms=60_000)
    assert queue.clear() == 1201
    assert queue.is_empty()
    assert queue.state("later") is RequestState.CANCELLED
    assert queue.state("runs") is RequestState.ACTIVE


# --- deadlines, crashes, dead letters


def test_a_deadline_ends_a_waiting_request(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", deadline_ms=50)
    put(queue, "b", deadline_ms=50)
    time.sleep(0.1)
    assert queue.take_batch(ROOM) == []
    assert last_event(client, queue, "a")["finish_reason"] == "expired"
    assert queue.state("b") is RequestState.EXPIRED


def test_a_deadline_ends_a_running_request(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", deadline_ms=100)
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    time.sleep(0.15)
    assert queue.publish([row(claim, 1)]).rows == [RowStatus.EXPIRED]
    assert last_event(client, queue, "a")["usage"]["completion_tokens"] == 1


def test_a_reaper_expires_what_no_worker_meets(client: Any, queue: RequestQueue) -> None:
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
    end = last_event(client, queue, "poison")
    assert end["error"]["type"] == "dead_letter"
    assert "2 crashes" in end["error"]["message"]
    assert client.pttl(queue.keys.request("poison")) == -1, "dead letters are kept"

    fresh = queue.requeue("poison")
    record = queue.run(scripts.record(queue.keys, fresh))
    assert record["requeued_from"] == "poison"
    (claim,) = queue.take_batch(ROOM)
    assert (claim.request_id, claim.attempt, claim.events) == (fresh, 1, [])
    with pytest.raises(RequestNotFoundError):
        queue.requeue("poison")


def test_handing_back_is_no_crash(client: Any) -> None:
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "a")
    for _ in range(5):
        (claim,) = queue.take_batch(ROOM)
        queue.release([held(claim)])
    assert queue.state("a") is RequestState.WAITING


# --- what strangers put there


def test_what_finished_is_not_run_again_and_its_end_is_told_again(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(queue.keys.events("a"))
        channel.get_message(timeout=1)
        client.zadd(queue.keys.pending, {"a": 1})
        assert queue.take_batch(ROOM) == []
        message = channel.get_message(timeout=5)
    assert json.loads(message["data"])["finish_reason"] == "stop"
    assert queue.is_empty()


def test_what_runs_is_not_run_twice(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.take_batch(ROOM)
    client.zadd(queue.keys.pending, {"a": 1})
    assert queue.take_batch(ROOM) == []
    assert queue.state("a") is RequestState.ACTIVE


def test_ids_without_a_proper_request_end_with_an_error(client: Any, queue: RequestQueue) -> None:
    client.zadd(queue.keys.pending, {"no-hash": 1, "with space": 2, "wrong-type": 3, "bad-log": 4})
    client.hset(queue.keys.request("with space"), "payload", '{"prompt":"a"}')
    client.set(queue.keys.request("wrong-type"), "text")
    client.hset(queue.keys.request("bad-log"), "payload", '{"prompt":"a"}')
    client.set(queue.keys.tokens("bad-log"), "text")
    put(queue, "good")
    assert ids(queue.take_batch(ROOM)) == ["good"]
    assert queue.is_empty()
    messages = {
        name: last_event(client, queue, name)["error"]["message"]
        for name in ("no-hash", "with space", "wrong-type")
    }
    assert messages["no-hash"].startswith("payload: ")
    assert messages["with space"].startswith("id: ")
    assert messages["wrong-type"].startswith("request: ")
    assert queue.state("bad-log") is RequestState.FAILED


def test_a_newer_version_is_left_to_newer_workers(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "newer", 1, '{"prompt":"a","version":2}')
    put_plainly(client, queue, "nested", 2, '{"prompt":"a","metadata":{"version":2}}')
    put_plainly(client, queue, "broken", 3, '{"prompt":"a","version":2')
    assert ids(queue.take_batch(ROOM)) == ["nested", "broken"]
    assert queue.contains("newer")


def test_a_plain_request_brings_its_priority_for_preemption(
    client: Any, queue: RequestQueue
) -> None:
    put_plainly(client, queue, "plain", 1, '{"prompt":"a","max_tokens":4,"priority":-7}')
    full = Room(max_count=0, token_budget=0, capacity=1000, preemptible=[(-6, 500)])
    assert ids(queue.take_batch(full)) == ["plain"]


def test_long_queues_of_cancelled_requests_are_worked_off(client: Any, queue: RequestQueue) -> None:
    """One call looks at a bounded number; the next goes on."""
    batch = [new() for _ in range(1500)]
    queue.enqueue(batch)
    for item in batch:
        client.hset(queue.keys.request(item.request_id), "cancelled", "1")
    put(queue, "good")
    for _ in range(10):
        if claims := queue.take_batch(ROOM):
            break
    assert ids(claims) == ["good"]
    assert queue.state(batch[0].request_id) is RequestState.CANCELLED


# --- asyncio


async def test_the_async_queue_does_the_same(server: Server) -> None:
    client = server.connect_async()
    queue = AsyncRequestQueue(client, worker_id="w1")
    first, second = await queue.enqueue([new(priority=1), new(priority=0)])
    assert await queue.count() == 2
    claim = await queue.take(timeout=5)
    assert claim is not None
    assert claim.request_id == second
    assert await queue.contains(first)
    assert not await queue.is_empty()
    published = await queue.publish([row(claim, 0)], [held(claim)])
    assert (published.rows, published.held) == ([RowStatus.OK], [RowStatus.OK])
    assert await queue.cancel(second) is CancelStatus.FLAGGED
    assert await queue.remove(first)
    assert await queue.release([held(claim)]) == ["cancelled"]
    assert await queue.state(second) is RequestState.CANCELLED
    await queue.enqueue([new(), new()])
    assert await queue.clear() == 2
    assert (await queue.reap()).returned == 0
    await queue.close()
    with pytest.raises(QueueClosedError):
        await queue.count()
    await client.aclose()


async def test_the_async_take_waits_can_be_aborted_and_cancelled(server: Server) -> None:
    client = server.connect_async()
    queue = AsyncRequestQueue(client)
    assert await queue.take(timeout=0.1) is None
    abort = asyncio.Event()
    waiting = asyncio.create_task(queue.take(abort=abort))
    await asyncio.sleep(0.1)
    abort.set()
    assert await waiting is None
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    waiting = asyncio.create_task(queue.take(timeout=20))
    await asyncio.sleep(0.1)
    (request_id,) = await AsyncRequestQueue(client).enqueue([new()])
    claim = await waiting
    assert claim is not None
    assert claim.request_id == request_id
    await client.aclose()


async def test_a_cancelled_claim_loses_no_request(server: Server) -> None:
    client = server.connect_async()
    queue = AsyncRequestQueue(client)
    await queue.enqueue([new() for _ in range(5)])
    for _ in range(20):
        claiming = asyncio.create_task(queue.take_batch(ROOM))
        await asyncio.sleep(0)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    assert await queue.count() == 5
    await client.aclose()
