"""Claims: which worker gets which requests, and in which order."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

from promptq.shared.errors import ModelMismatchError
from promptq.shared.protocol.claims import Held, ModelIdentity, Room
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, new, put, put_plainly, row


def test_hands_out_by_priority_and_first_in_first_out_within_one(
    queue: RequestQueue, seed: int
) -> None:
    rng = random.Random(seed)
    put_in = [(rng.choice([-1000, -5, 0, 3, 1000]), n) for n in range(60)]
    for priority, n in put_in:
        put(queue, f"{n:03}", priority=priority)
    expected = [f"{n:03}" for _, n in sorted(put_in)]
    assert ids(queue.take_batch(ROOM)) == expected


def test_a_claim_notes_when_its_reply_came(queue: RequestQueue) -> None:
    put(queue)
    asked_at = time.monotonic()
    (claim,) = queue.take_batch(ROOM)
    assert asked_at < claim.received_at <= time.monotonic()
    assert claim.server_ms(claim.received_at + 0.5) == claim.claimed_at_ms + 500


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


def test_an_aging_that_the_queue_sets_is_used(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "aging_ms", "100000")
    put(queue, "a", priority=-7)
    now = time.time() * 1000
    assert abs(client.zscore(queue.keys.pending, "a") - (now - 700_000)) < 60_000


def test_a_delayed_request_takes_its_place_by_priority(client: Any, queue: RequestQueue) -> None:
    put(queue, "normal")
    put(queue, "urgent-later", delay_ms=1, priority=-1)
    time.sleep(0.01)
    assert ids(queue.take_batch(ROOM)) == ["urgent-later", "normal"]
    assert client.zcard(queue.keys.delayed) == 0


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


def test_what_is_given_back_with_a_delay_is_back_at_its_old_place_after_it(
    queue: RequestQueue,
) -> None:
    """The request waits like a delayed one, and not as after an attempt that failed."""
    for request_id in ("a", "b", "c"):
        put(queue, request_id)
    claims = queue.take_batch(ROOM)
    held_by_ids = [held(claim) for claim in claims]
    assert queue.release(held_by_ids, delays_ms=[0, 3_600_000, 1]) == ["waiting"] * 3
    found: list[str] = []
    while len(found) < 2:
        found += [claim.request_id for claim in queue.take_batch(ROOM)]
    assert found == ["a", "c"]
    assert queue.state("b") is RequestState.WAITING
    assert queue.release(held_by_ids[1:2]) == ["fenced"], "it is held no more"
    record = queue.run(lookups.record(queue.keys, "b"))
    assert "history" not in record
    assert queue.cancel("b") is CancelStatus.CANCELLED


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


def test_a_negative_length_makes_no_room(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "first", 1, '{"prompt":"a","max_tokens":-1000000}')
    for n in range(10):
        put_plainly(client, queue, f"n{n}", 2 + n, '{"prompt":"a","max_tokens":60}')
    assert len(queue.take_batch(Room(max_count=100, token_budget=100))) == 2


def test_a_number_is_found_behind_texts_that_are_its_name(client: Any, queue: RequestQueue) -> None:
    payload = '{"stop":["max_tokens"],"metadata":{"max_tokens":"7"},"prompt":"","max_tokens" : 60}'
    put_plainly(client, queue, "a", 1, payload)
    (claim,) = queue.take_batch(ROOM)
    assert claim.cost == math.ceil(len(payload) / 4) + 60


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


def test_what_is_active_without_a_lease_is_claimed_again(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.take_batch(ROOM)
    client.delete(queue.keys.leases)
    client.zadd(queue.keys.pending, {"a": 1})
    assert ids(queue.take_batch(ROOM)) == ["a"]


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


def test_a_seed_is_given_once_and_kept(queue: RequestQueue) -> None:
    put(queue, "a")
    (first,) = queue.take_batch(ROOM)
    queue.release([held(first)])
    (second,) = queue.take_batch(ROOM)
    assert first.seed == second.seed
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.fence != second.fence


@pytest.mark.parametrize("seed", ["-1", "-5", "9223372036854775808", "1e3", "0x1", ""])
def test_a_seed_that_is_none_counts_as_left_out(
    client: Any, queue: RequestQueue, seed: str
) -> None:
    put(queue, "a")
    (first,) = queue.take_batch(ROOM)
    assert queue.release([held(first)]) == ["waiting"]
    client.hset(queue.keys.request("a"), "seed", seed)
    (second,) = queue.take_batch(ROOM)
    assert second.seed == first.seed
    assert 0 <= second.seed < 2**63


def seeds_of(queue: RequestQueue) -> dict[str, int]:
    """Of all that wait."""
    seeds: dict[str, int] = {}
    while not queue.is_empty() or queue.run(lookups.delayed_ids(queue.keys, 1)):
        seeds |= {claim.request_id: claim.seed for claim in queue.take_batch(ROOM)}
    return seeds


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
