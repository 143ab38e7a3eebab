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

from shared import lookups, scripts
from shared.errors import (
    InvalidRequestError,
    ModelMismatchError,
    QueueClosedError,
    QueueFullError,
    RequestExistsError,
    RequestNotFoundError,
)
from shared.events import ErrorInfo, Result, Stats, TokenEvent, TokenLogprob, Usage
from shared.observations import WorkerStats
from shared.request_queue import AsyncRequestQueue, RequestQueue, new_request_id
from shared.schemas import FinishReason, Request, RequestState
from shared.script_values import (
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
    return Row.of(claim.request_id, claim.fence, event(index, text, reason))


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
        queue.publish([Row.of(claim.request_id, claim.fence, finished)])
    put(queue, prompt="abcd" * 3, max_tokens=4000)
    (claim,) = queue.take_batch(ROOM)
    assert claim.cost == -(-len(claim.payload) // 4) + 5


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
    assert live == [entry.event_json for entry in rows]
    assert queue.state("a") is RequestState.COMPLETED
    record = queue.run(lookups.record(queue.keys, "a"))
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


def test_a_seed_survives_the_loss_of_its_claim(client: Any, queue: RequestQueue) -> None:
    """A failover may keep the enqueueing and lose the claim. Who reads on is then further than the
    log, so another seed would make it another text.
    """
    queue.enqueue([new("n:0"), new("n:1"), new("later", delay_ms=1)])
    put(queue, "of-a-tenant", tenant="t")
    put_plainly(client, queue, "Ab", 1, '{"prompt":"hello"}')
    put_plainly(client, queue, "BA", 2, '{"prompt":"hello"}')
    kept = {key: client.dump(key) for key in client.scan_iter()}
    first = seeds_of(queue)
    client.flushall()
    for key, value in kept.items():
        client.restore(key, 0, value)
    assert seeds_of(RequestQueue(client, worker_id="w2")) == first
    assert len(set(first.values())) == len(first) == 6
    client.flushall()
    put(queue, "n:0")
    assert seeds_of(queue)["n:0"] != first["n:0"], "another request, which has the id by chance"


def seeds_of(queue: RequestQueue) -> dict[str, int]:
    """Of all that wait."""
    seeds: dict[str, int] = {}
    while not queue.is_empty() or queue.run(lookups.delayed_ids(queue.keys, 1)):
        seeds |= {claim.request_id: claim.seed for claim in queue.take_batch(ROOM)}
    return seeds


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
    queue.publish([Row.of("a", claim.fence, first)])
    queue.cancel("a")
    queue.publish([], [held(claim)])
    result = json.loads(queue.run(lookups.record(queue.keys, "a"))["result"])
    assert result["token_ids"] == [2**31 - 1]
    assert result["text"] == '"\\/\n\x7f'
    put(queue, "b")
    queue.cancel("b")
    assert json.loads(queue.run(lookups.record(queue.keys, "b"))["result"])["token_ids"] == []


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
    record = queue.run(lookups.record(queue.keys, fresh))
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


# --- what is published, to the letter


def test_statuses_are_settled_row_by_row_before_any_is_written(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    put(queue, "b")
    a, b = queue.take_batch(ROOM)
    queue.cancel("b")
    sent = [row(a, 0), row(a, 1, reason=FinishReason.STOP), row(a, 2), row(b, 0), row(b, 1)]
    published = queue.publish(sent, [held(a), held(b)])
    assert published.rows == ["ok", "ok", "finished", "cancelled", "finished"]
    assert published.held == ["finished", "finished"]
    assert [at for at, _ in log_of(client, queue, "a")] == ["1-0", "2-1"]
    assert [at for at, _ in log_of(client, queue, "b")] == ["0-1"]


def test_a_row_that_cannot_be_written_does_not_stop_the_others(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "spoilt", priority=-1)
    put(queue, "good")
    spoilt, good = queue.take_batch(ROOM)
    client.set(queue.keys.tokens("spoilt"), "no stream any more")
    assert queue.publish([row(spoilt, 0), row(good, 0)]).rows == ["error", "ok"]
    assert len(log_of(client, queue, "good")) == 1


def test_a_result_that_the_worker_gives_is_kept_as_it_is(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([Row.of("a", claim.fence, event(0, reason=FinishReason.STOP), '{"given":true}')])
    assert queue.run(lookups.record(queue.keys, "a"))["result"] == '{"given":true}'


def test_a_result_that_the_server_folds_lacks_nothing(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    chosen = TokenLogprob(token_id=7, logprob=-0.5, rank=2, top=None)
    first = TokenEvent(index=0, token_ids=[7], text="x", logprobs=[chosen], attempt=1)
    last = TokenEvent(
        index=1, token_ids=[], text="", finish_reason=FinishReason.ERROR, attempt=1,
        usage=Usage(prompt_tokens=3, completion_tokens=1), stats=Stats(attempts=1),
        error=ErrorInfo(type="internal_error", message='"quoted"'),
    )  # fmt: skip
    queue.publish([Row.of("a", claim.fence, first), Row.of("a", claim.fence, last)])
    folded = Result.model_validate_json(queue.run(lookups.record(queue.keys, "a"))["result"])
    assert folded == Result.fold([first, last])


def test_nothing_is_added_behind_a_last_event(client: Any, queue: RequestQueue) -> None:
    """Neither when the hash has forgotten that there is one, nor when the log has expired."""
    for name in ("forgotten", "expired"):
        put(queue, name)
        (claim,) = queue.take_batch(ROOM)
        queue.publish([row(claim, 0, reason=FinishReason.STOP)])
        if name == "forgotten":
            client.hset(queue.keys.request(name), "state", "active")
        else:
            client.delete(queue.keys.tokens(name))
        published = queue.publish([row(claim, 0), row(claim, 1)], [held(claim)])
        assert published.rows == [RowStatus.FINISHED, RowStatus.FINISHED]
        assert published.held == [RowStatus.FINISHED]
    client.delete(queue.keys.request("forgotten"))
    client.zadd(queue.keys.pending, {"forgotten": 1})
    assert queue.take_batch(ROOM) == []
    assert [at for at, _ in log_of(client, queue, "forgotten")] == ["1-1"]
    assert not queue.contains("forgotten")


def test_a_finished_request_cannot_be_given_back(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert queue.release([held(claim)]) == ["finished"]
    assert queue.state("a") is RequestState.COMPLETED
    assert queue.is_empty()


def test_sharded_queues_publish_to_shard_channels(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "pubsub", "sharded")
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.ssubscribe(queue.keys.events("a"))
        channel.get_message(timeout=1)
        queue.publish([row(claim, 0, "live")])
        message = channel.get_message(timeout=5)
    assert json.loads(message["data"])["text"] == "live"


def test_logs_and_results_live_as_long_as_the_queue_says(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, mapping={"log_ttl_ms": "5000", "result_ttl_ms": "9000"})
    put(queue, "a")
    queue.cancel("a")
    assert 0 < client.pttl(queue.keys.tokens("a")) <= 5000
    assert 5000 < client.pttl(queue.keys.request("a")) <= 9000


def test_a_hash_lives_at_least_as_long_as_its_log(client: Any, queue: RequestQueue) -> None:
    """Else the id might be used again while a last event stands in its log."""
    client.hset(queue.keys.config, mapping={"log_ttl_ms": "9000", "result_ttl_ms": "1"})
    put(queue, "a")
    queue.cancel("a")
    assert client.pttl(queue.keys.request("a")) >= client.pttl(queue.keys.tokens("a")) > 1


def test_only_answers_that_ended_by_themselves_are_measured(
    client: Any, queue: RequestQueue
) -> None:
    for _ in range(140):
        put(queue)
    for claim in queue.take_batch(ROOM)[:135]:
        queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert client.llen(queue.keys.prefix + "outputs") == 128
    for request_id in [put(queue) for _ in range(200)]:
        queue.cancel(request_id)
    newest = put(queue)
    (claim,) = queue.take_batch(ROOM)
    payload = client.hget(queue.keys.request(newest), "payload")
    assert claim.cost == -(-len(payload) // 4) + 1


def test_times_are_kept(queue: RequestQueue) -> None:
    before = int(time.time() * 1000)
    put(queue, "a")
    (first,) = queue.take_batch(ROOM)
    time.sleep(0.01)
    queue.release([Held("a", first.fence, prompt_tokens=9)])
    (second,) = queue.take_batch(ROOM)
    assert second.enqueued_at_ms == first.enqueued_at_ms >= before - 1000
    assert second.claimed_at_ms > first.claimed_at_ms
    assert second.prompt_tokens == 9, "a release tells the length too"
    queue.publish([row(second, 0, reason=FinishReason.STOP)])
    record = queue.run(lookups.record(queue.keys, "a"))
    assert int(record["finished_at"]) >= second.claimed_at_ms


def test_what_is_put_back_wakes_the_workers(client: Any, queue: RequestQueue) -> None:
    """Whether a worker gives it back, a lease runs out or a dead letter is run again."""
    crashing = RequestQueue(client, lease_ms=1, max_crashes=2)
    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(queue.keys.control)
        channel.get_message(timeout=1)

        def is_woken() -> bool:
            message = channel.get_message(timeout=5)
            return message is not None and message["data"] == b"pending"

        put(queue, "a")
        assert is_woken()
        (claim,) = crashing.take_batch(ROOM)
        crashing.release([held(claim)])
        assert is_woken()
        for returned in (1, 0):
            crashing.take_batch(ROOM)
            time.sleep(0.01)
            assert crashing.reap().returned == returned
            assert not returned or is_woken()
        crashing.requeue("a")
        assert is_woken()


# --- claims, to the letter


def test_fences_differ_even_if_a_failover_hands_out_an_attempt_twice(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (before,) = queue.take_batch(ROOM)
    client.hset(queue.keys.request("a"), mapping={"state": "waiting", "attempt": "0"})
    client.zrem(queue.keys.leases, "a")
    client.zadd(queue.keys.pending, {"a": 1})
    (after,) = queue.take_batch(ROOM)
    assert before.attempt == after.attempt
    assert queue.publish([row(before, 0)]).rows == [RowStatus.FENCED]


def test_what_is_active_without_a_lease_is_claimed_again(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.take_batch(ROOM)
    client.delete(queue.keys.leases)
    client.zadd(queue.keys.pending, {"a": 1})
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_a_renewal_restores_a_lease_that_was_lost(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    client.delete(queue.keys.leases)
    assert queue.publish([], [held(claim)]).held == [RowStatus.OK]
    assert client.zscore(queue.keys.leases, "a") is not None


def test_one_claim_passes_a_request_over_once(client: Any, queue: RequestQueue) -> None:
    put(queue, "big", prompt="word " * 400, max_tokens=1, priority=-1)
    for _ in range(3):
        put(queue, max_tokens=1)
    assert len(queue.take_batch(Room(max_count=3, token_budget=100))) == 3
    assert client.hget(queue.keys.request("big"), "passed") == b"1"


def test_finds_what_it_may_take_behind_pages_of_what_it_may_not(
    client: Any, queue: RequestQueue
) -> None:
    for n in range(100):
        put_plainly(client, queue, f"newer-{n}", n, '{"prompt":"a","version":2}')
    put(queue, "good")
    claims = queue.take_batch(ROOM)
    assert ids(claims) == ["good"]
    assert claims.num_pending == 100


def test_one_claim_looks_at_a_bounded_number(client: Any, queue: RequestQueue) -> None:
    batch = [new() for _ in range(1000)]
    queue.enqueue(batch)
    for item in batch:
        client.hset(queue.keys.request(item.request_id), "cancelled", "1")
    queue.take_batch(ROOM)
    assert 0 < queue.count() < 1000


def test_a_negative_length_makes_no_room(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "first", 1, '{"prompt":"a","max_tokens":-1000000}')
    for n in range(10):
        put_plainly(client, queue, f"n{n}", 2 + n, '{"prompt":"a","max_tokens":60}')
    assert len(queue.take_batch(Room(max_count=100, token_budget=100))) == 2


def test_an_aging_that_the_queue_sets_is_used(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "aging_ms", "1000")
    put(queue, "a", priority=-7)
    now = time.time() * 1000
    assert abs(client.zscore(queue.keys.pending, "a") - (now - 7000)) < 500


def test_a_delayed_request_takes_its_place_by_priority(client: Any, queue: RequestQueue) -> None:
    put(queue, "normal")
    put(queue, "urgent-later", delay_ms=1, priority=-1)
    time.sleep(0.01)
    assert ids(queue.take_batch(ROOM)) == ["urgent-later", "normal"]
    assert client.zcard(queue.keys.delayed) == 0


def test_a_reaper_brings_what_was_delayed(queue: RequestQueue) -> None:
    put(queue, "later", delay_ms=1)
    time.sleep(0.01)
    assert queue.reap().returned == 1
    assert queue.contains("later")


# --- enqueue, to the letter


def test_an_id_cannot_stand_twice_in_a_batch(queue: RequestQueue) -> None:
    with pytest.raises(RequestExistsError, match="'a'"):
        queue.enqueue([new("a"), new("a")])
    assert queue.is_empty()


def test_an_idempotency_key_holds_within_a_batch_and_for_its_time(client: Any) -> None:
    queue = RequestQueue(client, idempotency_ms=5000)
    first, again = queue.enqueue([new(idempotency_key="k"), new(idempotency_key="k")])
    assert first == again
    assert queue.count() == 1
    assert 0 < client.pttl(queue.keys.prefix + "idempotency:k") <= 5000


def test_an_idempotency_key_holds_while_its_request_is_kept(client: Any) -> None:
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "a", idempotency_key="k")
    for _ in range(2):
        (claim,) = queue.take_batch(ROOM)
        queue.release([Held(claim.request_id, claim.fence)], crashed=True)
    assert put(queue, "b", idempotency_key="k") == "a"
    assert queue.purge(["a"]) == 1
    assert put(queue, "b", idempotency_key="k") == "b"
    assert put(queue, "c", idempotency_key="k") == "b"
    assert queue.state("b") is RequestState.WAITING


def test_nothing_is_left_of_a_purged_request(client: Any) -> None:
    """Not even where a plain client put it into the queue once more."""
    queue = RequestQueue(client, max_crashes=1)
    put(queue, "a")
    for _ in range(2):
        (claim,) = queue.take_batch(ROOM)
        queue.release([Held(claim.request_id, claim.fence)], crashed=True)
    client.zadd(queue.keys.pending, {"a": 1})
    assert queue.purge(["a"]) == 1
    assert queue.is_empty()
    assert queue.take_batch(ROOM) == []
    assert not client.exists(queue.keys.request("a"), queue.keys.tokens("a"))


def test_an_id_that_was_ended_without_a_payload_is_taken(client: Any, queue: RequestQueue) -> None:
    """A last event of it was published, so that it cannot begin."""
    client.zadd(queue.keys.pending, {"a": 1})
    assert queue.take_batch(ROOM) == []
    with pytest.raises(RequestExistsError):
        put(queue, "a")
    assert queue.state("a") is RequestState.FAILED


def test_a_full_queue_still_knows_its_idempotency_keys(client: Any, queue: RequestQueue) -> None:
    first = put(queue, idempotency_key="k")
    client.hset(queue.keys.config, "max_pending", "1")
    put_plainly(client, queue, "beyond the limit", 1, "{}")
    assert put(queue, idempotency_key="k") == first


def test_delayed_requests_count_for_the_limit(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "max_pending", "1")
    put(queue, delay_ms=60_000)
    with pytest.raises(QueueFullError):
        put(queue)


def test_a_full_queue_estimates_by_the_rate_of_the_last_finishes(
    client: Any, queue: RequestQueue
) -> None:
    for _ in range(2):
        put(queue)
    for claim in queue.take_batch(ROOM):
        queue.publish([row(claim, 0, reason=FinishReason.STOP)])
        time.sleep(0.3)
    client.hset(queue.keys.config, "max_pending", "1")
    with pytest.raises(QueueFullError) as caught:
        queue.enqueue([new() for _ in range(3)])
    assert caught.value.retry_after_ms >= 2 * 290


def test_an_id_whose_key_is_of_another_type_is_taken(client: Any, queue: RequestQueue) -> None:
    client.set(queue.keys.request("a"), "text")
    with pytest.raises(RequestExistsError):
        put(queue, "a")


# --- reap and requeue, to the letter


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


# --- cancel, to the letter


def test_a_message_alone_cancels_nothing_that_waits(queue: RequestQueue) -> None:
    put(queue, "a")
    assert queue.run(scripts.cancel(["a"], "flagged")) == [CancelStatus.ACTIVE]
    assert queue.contains("a")


def test_removing_what_runs_does_not_flag_it(queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    assert not queue.remove("a")
    assert queue.publish([row(claim, 0)]).rows == [RowStatus.OK]


def test_clear_ends_whatever_strangers_left_in_the_queue(client: Any, queue: RequestQueue) -> None:
    put(queue, "runs", priority=-1)
    put(queue, "over")
    runs, over = queue.take_batch(ROOM)
    queue.publish([row(over, 0, reason=FinishReason.STOP)])
    client.zadd(queue.keys.pending, {"runs": 1, "over": 2, b"\xff": 3, "no-hash": 4})
    put(queue, "waits")
    assert queue.clear() == 3
    assert queue.is_empty()
    assert queue.publish([row(runs, 0)]).rows == [RowStatus.OK]
    assert queue.state("over") is RequestState.COMPLETED


# --- heartbeats


def test_a_worker_that_tells_nothing_any_more_is_forgotten(
    client: Any, queue: RequestQueue
) -> None:
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="gone"), ttl_ms=1)) == 1
    time.sleep(0.01)
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="here", pid=7), ttl_ms=5000)) == 1
    assert queue.run(lookups.live_worker_ids(queue.keys, 0)) == ["here"]
    assert queue.run(lookups.worker_stats(queue.keys, "gone")) is None
    told = queue.run(lookups.worker_stats(queue.keys, "here"))
    assert told is not None
    assert told.pid == 7
    assert 0 < client.pttl(queue.keys.worker("here")) <= 5000
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="here"), ttl_ms=0)) == 0
    assert queue.run(lookups.worker_stats(queue.keys, "here")) is None


# --- fields that a stranger spoilt

SPOILT = [
    ("attempt", "x"),
    ("prompt_tokens", "abc"),
    ("prompt_tokens", "1.5"),
    ("enqueued_at", "2026-01-01T00:00:00"),
    ("enqueued_at", "1790000000.5"),
    ("seed", "abc"),
    ("seed", "-"),
    ("passed", "x"),
    ("crashes", "x"),
    ("priority", "x"),
    ("priority", "nan"),
    ("score", "soon"),
    ("score", "nan"),
    ("state", "queued"),
]


@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_a_spoilt_field_hinders_neither_the_request_nor_others(
    client: Any, name: str, value: str
) -> None:
    queue = RequestQueue(client, lease_ms=1)
    for request_id in ("bad", "late"):
        payload = {"payload": '{"prompt":"a"}', name: value}
        client.hset(queue.keys.request(request_id), mapping=payload)
    client.zadd(queue.keys.pending, {"bad": 1})
    client.zadd(queue.keys.delayed, {"late": 1})
    assert queue.state("bad") is RequestState.WAITING
    put(queue, "good")
    assert sorted(ids(queue.take_batch(ROOM))) == ["bad", "good", "late"]
    client.hset(queue.keys.request("bad"), name, value)
    time.sleep(0.01)
    assert queue.reap().returned == 3
    claims = {claim.request_id: claim for claim in queue.take_batch(ROOM)}
    assert sorted(claims) == ["bad", "good", "late"]
    client.hset(queue.keys.request("bad"), name, value)
    assert queue.release([held(claims["bad"]), held(claims["good"])]) == ["waiting", "waiting"]
    assert queue.contains("bad")
    assert queue.cancel("bad") is CancelStatus.CANCELLED
    assert last_event(client, queue, "bad")["finish_reason"] == "cancelled"


@pytest.mark.parametrize(
    "name", ["aging_ms", "max_pending", "log_ttl_ms", "result_ttl_ms", "strict_priority", "pubsub"]
)
@pytest.mark.parametrize("value", ["abc", "inf", "nan", "", "1e300"])
def test_a_setting_without_sense_counts_as_left_out(
    client: Any, queue: RequestQueue, name: str, value: str
) -> None:
    client.hset(queue.keys.config, name, value)
    put(queue, "a", priority=-1)
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert queue.state("a") is RequestState.COMPLETED
    assert 0 < client.pttl(queue.keys.tokens("a")) <= 60_000
    assert 60_000 < client.pttl(queue.keys.request("a")) <= 3_600_000


def test_an_entry_in_the_log_that_is_no_event_does_not_hinder_the_end(
    client: Any, queue: RequestQueue
) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    client.xadd(queue.keys.tokens("a"), {"event": "junk"}, id="2-0")
    queue.cancel("a")
    assert queue.publish([], [held(claim)]).held == [RowStatus.CANCELLED]
    record = queue.run(lookups.record(queue.keys, "a"))
    assert record["state"] == "cancelled"
    assert json.loads(record["result"])["text"] == "x"
    assert client.zcard(queue.keys.leases) == 0


def test_a_request_whose_hash_was_deleted_while_it_ran_gets_its_last_event(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=1)
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0)])
    client.delete(queue.keys.request("a"))
    assert queue.publish([row(claim, 1)], [held(claim)]).rows == [RowStatus.FENCED]
    time.sleep(0.01)
    assert queue.reap().ended == 1
    end = last_event(client, queue, "a")
    assert end["error"]["message"].startswith("request: ")
    assert end["usage"]["completion_tokens"] == 1
    assert client.pttl(queue.keys.tokens("a")) > 0


def test_a_payload_beyond_the_limit_is_refused_before_it_travels(
    client: Any, queue: RequestQueue
) -> None:
    put_plainly(client, queue, "huge", 1, '{"prompt":"' + "x" * 2**23 + '"}')
    put_plainly(client, queue, "b" * 201, 2, '{"prompt":"a"}')
    assert queue.take_batch(ROOM) == []
    assert last_event(client, queue, "huge")["error"]["message"].startswith("payload: 83886")
    assert last_event(client, queue, "b" * 201)["error"]["message"].startswith("id: ")


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
