"""A queue with `shortest_first_ms` runs short requests first, within a stated bound."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.queue.call import Call, named
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, put, row

MEAN = 100
"""Tokens of the last answers of `shortest_first`'s queue."""

MOST_MS = 20_000


def put_guesses(client: Any, queue: RequestQueue, pairs: list[tuple[int, int]]) -> None:
    """Let requests have finished with these expected and actual outputs."""
    key = queue.keys.prefix + "statistics:guesses"
    client.delete(key)
    client.rpush(key, *[f"{expected} {actual}" for expected, actual in pairs])


@pytest.fixture
def shortest_first(client: Any, queue: RequestQueue) -> RequestQueue:
    """A queue that runs short requests first, and has had answers of `MEAN` tokens, of which
    clients expected each."""
    client.hset(queue.keys.config, "shortest_first_ms", MOST_MS)
    put_guesses(client, queue, [(nth, nth) for nth in range(1, 129)])
    client.rpush(queue.keys.prefix + "outputs", f"2 {MEAN // 2}", f"1 {MEAN * 3 // 2}")
    return queue


def shift_of(client: Any, queue: RequestQueue, request_id: str) -> float:
    """Returns how much later than it came a request has its place (ms)."""
    score, enqueued_at = client.hmget(queue.keys.request(request_id), "score", "enqueued_at")
    return float(score) - float(enqueued_at)


KINDS: dict[str, dict[str, Any]] = {
    "unknown": {},
    "long": {"expected_tokens": 2 * MEAN},
    "short": {"expected_tokens": MEAN // 5},
    "limited": {"max_tokens": MEAN // 2},
    "unlimited": {"max_tokens": 50 * MEAN},
    "bounded guess": {"expected_tokens": 9 * MEAN, "max_tokens": MEAN // 4},
    "one": {"max_tokens": 1},
    "vector": {"embed": {}},
    "tokens": {"tokenize": True},
}
SHORTEST_FIRST = ["vector", "tokens", "one", "short", "bounded guess", "limited"]
BY_ARRIVAL = ["unknown", "unlimited"]


@pytest.mark.parametrize("tenant", [None, "t"])
def test_short_requests_run_first_and_unknown_ones_by_arrival(
    client: Any, shortest_first: RequestQueue, tenant: str | None
) -> None:
    names = {f"{nth}": name for nth, name in enumerate(KINDS)}  # the order in one millisecond
    for request_id, name in names.items():
        put(shortest_first, request_id, tenant=tenant, **KINDS[name])
    shift_of_unknown = shift_of(client, shortest_first, f"{[*KINDS].index('unknown')}")
    order = [names[request_id] for request_id in ids(shortest_first.take_batch(ROOM))]
    assert order == [*SHORTEST_FIRST, *BY_ARRIVAL, "long"]
    assert shift_of_unknown == 0


@pytest.mark.parametrize("setting", [None, "0", "-5", "x"])
def test_without_the_setting_requests_run_by_arrival(
    client: Any, queue: RequestQueue, setting: str | None
) -> None:
    if setting is not None:
        client.hset(queue.keys.config, "shortest_first_ms", setting)
    for nth, fields in enumerate(KINDS.values()):
        put(queue, f"{nth}", **fields)
    assert [shift_of(client, queue, f"{nth}") for nth in range(len(KINDS))] == [0] * len(KINDS)
    assert len(queue.take_batch(ROOM)) == len(KINDS)


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_without_the_setting_no_answers_are_read(client: Any, queue: RequestQueue) -> None:
    client.config_resetstat()
    put(queue, expected_tokens=1)
    assert "cmdstat_lrange" not in client.info("commandstats")


def test_no_request_is_overtaken_by_one_that_comes_too_late(
    client: Any, shortest_first: RequestQueue, seed: int
) -> None:
    """Requests that a plain client enqueues by arrival wait no longer either."""
    rng = random.Random(seed)
    most_ms = rng.choice([3, 10, 30])
    client.hset(shortest_first.keys.config, "shortest_first_ms", most_ms)
    for nth in range(60):
        length = rng.choice([None, 0, 1, MEAN, 2 * MEAN, rng.randrange(9 * MEAN)])
        put(shortest_first, f"{nth}", expected_tokens=length)
        time.sleep(rng.expovariate(1000))
    arrived_at = {
        f"{nth}": int(client.hget(shortest_first.keys.request(f"{nth}"), "enqueued_at"))
        for nth in range(60)
    }
    latest = 0
    for request_id in ids(shortest_first.take_batch(ROOM)):
        latest = max(latest, arrived_at[request_id])
        assert latest - arrived_at[request_id] <= 2 * most_ms


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("setting", [10**12, 10**14])
def test_a_long_request_still_runs_before_a_short_one_of_lower_priority(
    client: Any, shortest_first: RequestQueue, setting: int, is_strict: bool
) -> None:
    config = {"shortest_first_ms": setting, "strict_priority": int(is_strict)}
    client.hset(shortest_first.keys.config, mapping=config)
    lengths = {"1-urgent": (-1, 9 * MEAN), "2": (0, 0), "3": (0, 9 * MEAN), "4-lazy": (1, 0)}
    for name, (priority, expected) in lengths.items():
        put(shortest_first, name, priority=priority, expected_tokens=expected)
    assert ids(shortest_first.take_batch(ROOM)) == [*lengths]


def test_a_tenant_gains_no_turns_by_a_forged_length(shortest_first: RequestQueue) -> None:
    for nth in range(4):
        put(shortest_first, f"honest-{nth}", tenant="honest")
        put(shortest_first, f"forger-{nth}", tenant="forger", expected_tokens=0)
    order = [request_id.partition("-")[0] for request_id in ids(shortest_first.take_batch(ROOM))]
    assert [sorted(pair) for pair in zip(order[::2], order[1::2], strict=True)] == [
        ["forger", "honest"]
    ] * 4


@pytest.mark.parametrize(
    "forged", ["", "-1", "-999999999", "1e9", "nan", "inf", "x", "9" * 15, "9" * 400]
)
@pytest.mark.parametrize("max_tokens", ["7", "-7", "9" * 30, '{"max_tokens":-9}'])
def test_a_forged_length_moves_its_request_within_the_bound(
    client: Any, shortest_first: RequestQueue, forged: str, max_tokens: str
) -> None:
    payload = f'{{"prompt":"a","max_tokens":{max_tokens}}}'
    args = named(idempotency_ms=1, fields="id,payload,expected_tokens", nonce="n")
    shortest_first.run(Call("enqueue", [*args, "then", "a", payload, forged], list))
    assert abs(shift_of(client, shortest_first, "a")) <= MOST_MS


def test_a_call_of_the_last_release_counts_as_of_unknown_length(
    client: Any, shortest_first: RequestQueue
) -> None:
    """Such a call passes its values by position, and no expected length."""
    values = ["a", '{"prompt":"a"}', 0, 0, 0, "", "", "", ""]
    shortest_first.run(Call("enqueue", ["60000 9", *values, "nonce"], list))
    assert shift_of(client, shortest_first, "a") == 0


def test_a_window_keeps_its_place(client: Any, shortest_first: RequestQueue) -> None:
    put(shortest_first, "a", completion_window="1m", expected_tokens=0)
    assert shift_of(client, shortest_first, "a") == 0


def test_a_place_lasts_through_a_return_and_another_priority(
    client: Any, shortest_first: RequestQueue
) -> None:
    put(shortest_first, "late", delay_ms=1, expected_tokens=0)
    put(shortest_first, "long", expected_tokens=9 * MEAN)
    put(shortest_first, "short", expected_tokens=0)
    put(shortest_first, "unknown")
    time.sleep(0.005)
    order = ["late", "short", "unknown", "long"]
    claims = shortest_first.take_batch(ROOM)
    assert ids(claims) == order
    shortest_first.release([held(claim) for claim in claims])
    for name in order:
        payload = client.hget(shortest_first.keys.request(name), "payload").decode()
        args = [name, "-3", payload, payload]
        assert shortest_first.run(Call("reprioritise", args, bytes)) == b"changed"
    assert ids(shortest_first.take_batch(ROOM)) == order


def test_no_worker_has_to_know_the_field(shortest_first: RequestQueue) -> None:
    put(shortest_first, "a", expected_tokens=3)
    [claim] = shortest_first.take_batch(ROOM)
    assert b"expected" not in bytes(claim.payload)


def test_guesses_move_requests_only_as_far_as_they_have_predicted_outputs(
    client: Any, shortest_first: RequestQueue, seed: int
) -> None:
    rng = random.Random(seed)
    shifts = []
    for predictability in (1.0, 0.2, 0.0):
        actual = [rng.randrange(2 * MEAN) for _ in range(128)]
        noise = [rng.randrange(2 * MEAN) for _ in range(128)]
        guesses = [
            round(predictability * true + (1 - predictability) * other)
            for true, other in zip(actual, noise, strict=True)
        ]
        put_guesses(client, shortest_first, [*zip(guesses, actual, strict=True)])
        request_id = put(shortest_first, expected_tokens=0)
        shifts.append(shift_of(client, shortest_first, request_id))
    assert shifts[0] == -MOST_MS < shifts[1] <= shifts[2] <= 0
    assert shifts[2] > -MOST_MS / 2, "noise correlates only by chance"


@pytest.mark.parametrize("pairs", [[], [(1, 1)], [(5, 9)] * 128, [(1, 200), (200, 1)] * 64])
def test_guesses_that_show_nothing_move_no_request(
    client: Any, shortest_first: RequestQueue, pairs: list[tuple[int, int]]
) -> None:
    client.delete(shortest_first.keys.prefix + "statistics:guesses")
    if pairs:
        put_guesses(client, shortest_first, pairs)
    put(shortest_first, "a", expected_tokens=0)
    put(shortest_first, "b", expected_tokens=0, max_tokens=MEAN // 2)
    assert shift_of(client, shortest_first, "a") == 0
    assert shift_of(client, shortest_first, "b") == -MOST_MS / 2, "max_tokens is no guess"


@pytest.mark.parametrize(
    ("guess", "expected"), [(7, 7), (2 * MEAN, MEAN * 3 // 2), (10**12, MEAN * 3 // 2)]
)
def test_a_guess_lowers_the_cost_of_a_request_if_guesses_came_true(
    client: Any, shortest_first: RequestQueue, guess: int, expected: int
) -> None:
    """Without a guess, a request costs the output that 9 of 10 answers do not exceed."""
    put(shortest_first, "unknown", prompt="Once")
    put(shortest_first, "guessed", prompt="Once", expected_tokens=guess)
    claims = shortest_first.take_batch(ROOM)
    costs = {claim.request_id: claim.cost for claim in claims}
    assert costs["unknown"] - costs["guessed"] == MEAN * 3 // 2 - expected
    shortest_first.release([held(claim) for claim in claims])
    client.delete(shortest_first.keys.prefix + "statistics:guesses")
    costs = {claim.request_id: claim.cost for claim in shortest_first.take_batch(ROOM)}
    assert costs["unknown"] == costs["guessed"], "no guess has come true"


def test_finished_requests_show_how_well_their_lengths_were_expected(
    client: Any, queue: RequestQueue
) -> None:
    """Each counts as its guess, up to its max_tokens. Without the setting, none counts."""
    guesses = queue.keys.prefix + "statistics:guesses"
    finish(queue, "off", expected_tokens=5)
    assert not client.exists(guesses)
    client.hset(queue.keys.config, "shortest_first_ms", MOST_MS)
    finish(queue, "unknown")
    finish(queue, "guess", expected_tokens=5)
    finish(queue, "limited", expected_tokens=5, max_tokens=3)
    finish(queue, "of-tenant", expected_tokens=7, tenant="t")
    assert client.lrange(guesses, 0, -1) == [b"7 1", b"3 1", b"5 1"]


@pytest.mark.parametrize("of_type", ["set", "rpush"])
def test_spoilt_guesses_move_no_request(
    client: Any, shortest_first: RequestQueue, of_type: str
) -> None:
    guesses = shortest_first.keys.prefix + "statistics:guesses"
    client.delete(guesses)
    getattr(client, of_type)(guesses, "9" * 400 + " 1")
    put(shortest_first, "a", expected_tokens=0)
    assert shift_of(client, shortest_first, "a") == 0
    client.hset(shortest_first.keys.request("a"), "expected_tokens", "junk")
    [claim] = shortest_first.take_batch(ROOM)
    shortest_first.publish([row(claim, 0, "x", FinishReason.STOP)])
    assert shortest_first.state("a") is RequestState.COMPLETED


def finish(queue: RequestQueue, request_id: str, **fields: Any) -> None:
    put(queue, request_id, **fields)
    [claim] = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, "x", FinishReason.STOP)])
