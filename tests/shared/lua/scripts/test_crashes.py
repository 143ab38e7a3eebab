"""Crashes are counted apart from attempts, and who may have caused them runs alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.claims import Claim, ClaimContext, ModelIdentity, Room
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.call import script_text
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, last_event, put, row

BUSY = Room(max_count=1000, token_budget=10**9, num_held=1)


@pytest.fixture
def queue(client: Any) -> RequestQueue:
    """Without backoff, unless a test sets one."""
    queue = RequestQueue(client, worker_id="w1")
    client.hset(queue.keys.config, "crash_backoff_ms", "0")
    return queue


def crash(client: Any, queue: RequestQueue, claims: list[Claim]) -> None:
    """Let the leases run out, as if their worker had died."""
    client.zadd(queue.keys.leases, {claim.request_id: 1 for claim in claims})
    queue.reap()


def make_suspects(client: Any, queue: RequestQueue, names: list[str]) -> None:
    for name in names:
        put(queue, name)
    for _ in range(2):
        claims = queue.take_batch(ROOM)
        assert ids(claims) == names
        crash(client, queue, claims)


def history_of(queue: RequestQueue, request_id: str) -> list[dict[str, Any]]:
    record = queue.run(lookups.record(queue.keys, request_id))
    history: list[dict[str, Any]] = json.loads(record.get("history", "[]"))
    return history


def bury(client: Any, queue: RequestQueue, request_id: str) -> None:
    make_suspects(client, queue, [request_id])
    crash(client, queue, queue.take_batch(ROOM))
    assert queue.state(request_id) is RequestState.DEAD


# --- suspects


def test_who_was_aboard_at_two_crashes_runs_alone(client: Any, queue: RequestQueue) -> None:
    make_suspects(client, queue, ["a", "b"])
    put(queue, "c")
    (a,) = queue.take_batch(ROOM)
    assert (a.request_id, a.is_suspect) == ("a", True)
    queue.publish([row(a, 0, reason=FinishReason.STOP)])
    (b,) = queue.take_batch(ROOM)
    assert (b.request_id, b.is_suspect) == ("b", True)
    queue.publish([row(b, 0, reason=FinishReason.STOP)])
    (c,) = queue.take_batch(ROOM)
    assert (c.request_id, c.is_suspect) == ("c", False)


def test_a_busy_worker_gets_no_suspect_but_what_stands_behind(
    client: Any, queue: RequestQueue
) -> None:
    make_suspects(client, queue, ["a"])
    put(queue, "b")
    assert ids(queue.take_batch(BUSY)) == ["b"]
    assert ids(queue.take_batch(BUSY)) == []
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_a_process_of_several_takers_keeps_to_the_rule_by_saying_what_it_holds(
    client: Any, queue: RequestQueue
) -> None:
    """`take` speaks for a process that holds nothing else; one that claims for all does not."""
    put(queue, "first")
    first = queue.take(timeout=0)
    assert first is not None
    make_suspects_beside(client, queue, first)
    together = Room(max_count=1, token_budget=10**9, num_held=1)
    assert queue.take_batch(together) == []
    alone = queue.take(timeout=0)
    assert alone is not None
    assert alone.is_suspect, "as if another process had taken it"


def make_suspects_beside(client: Any, queue: RequestQueue, running: Claim) -> None:
    other = RequestQueue(client, worker_id="w2")
    make_suspects(client, other, ["suspect"])
    assert queue.publish([], [held(running)]).held == ["ok"]


def test_a_suspect_does_not_join_what_the_same_call_hands_out(
    client: Any, queue: RequestQueue
) -> None:
    make_suspects(client, queue, ["a"])
    put(queue, "urgent", priority=-5)
    put(queue, "b")
    assert ids(queue.take_batch(ROOM)) == ["urgent", "b"]


def test_a_suspect_is_overtaken_only_so_often(client: Any, queue: RequestQueue) -> None:
    """Then busy workers get nothing, so that one of them becomes empty."""
    make_suspects(client, queue, ["a"])
    others = [put(queue) for _ in range(40)]
    one_more = Room(max_count=1, token_budget=10**9, num_held=1)
    overtaken = 0
    while claims := queue.take_batch(one_more):
        assert claims[0].request_id in others
        overtaken += 1
    assert 0 < overtaken < 20
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_while_one_suspect_runs_the_others_keep_no_worker_from_the_rest(
    client: Any, queue: RequestQueue
) -> None:
    make_suspects(client, queue, ["a", "b"])
    others = [put(queue) for _ in range(40)]
    one_more = Room(max_count=1, token_budget=10**9, num_held=1)
    for _ in range(8):
        queue.take_batch(one_more)
    assert queue.take_batch(one_more) == []
    (a,) = queue.take_batch(ROOM)
    taken = [claim.request_id for _ in range(20) for claim in queue.take_batch(one_more)]
    assert len(taken) == 20
    assert set(taken) < set(others)
    queue.publish([row(a, 0, reason=FinishReason.STOP)])
    assert queue.take_batch(one_more) == [], "now it is the turn of b"
    assert ids(queue.take_batch(ROOM)) == ["b"]


def test_a_worker_of_before_that_says_not_what_it_holds_gets_no_suspect(
    client: Any, queue: RequestQueue
) -> None:
    make_suspects(client, queue, ["a"])
    script = client.register_script(script_text("claim"))
    args = ["old", 1000, 10, 10**6, 10**6, "nonce", 1, "", "", "", "seed"]
    assert len(script(keys=[queue.keys.pending], args=args)) == 3
    put(queue, "b")
    reply = script(keys=[queue.keys.pending], args=args)
    assert [item[0] for item in reply[3:]] == [b"b"]


def test_a_slow_worker_is_not_taken_for_a_dead_one(client: Any, queue: RequestQueue) -> None:
    """A crash that would make a dead letter waits, once, until the worker's heartbeats have
    stopped.
    """
    make_suspects(client, queue, ["a"])
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w1"), 60_000))
    (a,) = queue.take_batch(ROOM)
    crash(client, queue, [a])
    assert queue.state("a") is RequestState.ACTIVE
    published = queue.publish([row(a, 0)], [held(a)])
    assert [*published.rows, *published.held] == [RowStatus.OK, RowStatus.OK]
    assert client.zscore(queue.keys.leases, "a") > time.time() * 1000
    crash(client, queue, [a])
    assert queue.state("a") is RequestState.DEAD


def test_a_worker_of_which_nothing_is_heard_is_dead(client: Any, queue: RequestQueue) -> None:
    make_suspects(client, queue, ["a"])
    queue.run(scripts.heartbeat(WorkerStats(worker_id="w1"), 60_000))
    claims = queue.take_batch(ROOM)
    client.zadd(queue.keys.workers, {"w1": 1})
    crash(client, queue, claims)
    assert queue.state("a") is RequestState.DEAD


# --- dead letters


def test_only_a_suspect_that_crashes_a_worker_alone_is_buried(
    client: Any, queue: RequestQueue
) -> None:
    make_suspects(client, queue, ["1-poison", "2-innocent"])
    poison = queue.take_batch(ROOM)
    crash(client, queue, poison)
    assert queue.state("1-poison") is RequestState.DEAD
    assert queue.state("2-innocent") is RequestState.WAITING
    (innocent,) = queue.take_batch(ROOM)
    assert queue.publish([row(innocent, 0, reason=FinishReason.STOP)]).rows == ["ok"]
    assert "3 crashes" in last_event(queue, "1-poison")["error"]["message"]


def test_crashes_in_company_never_bury(client: Any, queue: RequestQueue) -> None:
    """This happens if a worker that knows no suspects claims one with others."""
    put(queue, "a")
    for n in range(6):
        claims = queue.take_batch(ROOM)
        client.hdel(queue.keys.request("a"), "alone", "suspect")
        crash(client, queue, claims)
        assert queue.state("a") is RequestState.WAITING, n


def test_a_dead_letter_keeps_its_history(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.release([held(claim)])
    for _ in range(3):
        crash(client, queue, queue.take_batch(ROOM))
    assert queue.state("a") is RequestState.DEAD
    history = history_of(queue, "a")
    assert [item["how"] for item in history] == [
        "given back",
        "crashed",
        "crashed",
        "crashed alone",
    ]
    assert [item["attempt"] for item in history] == [1, 2, 3, 4]
    assert {item["worker"] for item in history} == {"w1"}
    now = time.time() * 1000
    assert all(now - 60_000 < item["claimed_at"] <= item["ended_at"] for item in history)


def test_history_is_bounded_and_may_be_spoilt(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    for _ in range(40):
        queue.release([held(claim) for claim in queue.take_batch(ROOM)])
    history = history_of(queue, "a")
    assert (len(history), history[-1]["attempt"]) == (16, 40)
    for junk in ("no json", "{}", "7", '{"a":1}'):
        client.hset(queue.keys.request("a"), "history", junk)
        queue.release([held(claim) for claim in queue.take_batch(ROOM)])
        assert len(history_of(queue, "a")) == 1


def test_an_engine_that_fails_counts_at_once(client: Any) -> None:
    queue = RequestQueue(client, max_crashes=2)
    put(queue, "a")
    assert queue.release([held(c) for c in queue.take_batch(ROOM)], crashed=True) == ["waiting"]
    assert queue.release([held(c) for c in queue.take_batch(ROOM)], crashed=True) == ["dead"]
    assert queue.state("a") is RequestState.DEAD


def test_what_runs_again_after_its_burial_harms_nobody_else(
    client: Any, queue: RequestQueue
) -> None:
    bury(client, queue, "a")
    again = queue.requeue("a")
    put(queue, "b")
    assert ids(queue.take_batch(BUSY)) == ["b"]
    (claim,) = queue.take_batch(ROOM)
    assert (claim.request_id, claim.is_suspect) == (again, True)


def test_a_purged_dead_letter_leaves_nothing(client: Any, queue: RequestQueue) -> None:
    bury(client, queue, "a")
    put(queue, "b")
    assert queue.purge(["a", "b", "c"]) == 1
    assert client.zcard(queue.keys.dead) == 0
    assert client.exists(queue.keys.request("a"), queue.keys.tokens("a")) == 0
    assert queue.state("b") is RequestState.WAITING
    with pytest.raises(RequestNotFoundError):
        queue.requeue("a")


@pytest.mark.parametrize(("kept_ms", "setting"), [(14 * 86_400_000, None), (3_600_000, "3600000")])
def test_a_dead_letter_that_was_kept_for_its_time_is_deleted(
    client: Any, queue: RequestQueue, kept_ms: int, setting: str | None
) -> None:
    if setting:
        client.hset(queue.keys.config, "dead_ttl_ms", setting)
    bury(client, queue, "old")
    bury(client, queue, "new")
    now = time.time() * 1000
    client.zadd(queue.keys.dead, {"old": now - kept_ms - 1, "new": now - kept_ms / 2})
    assert queue.reap().purged == 1
    assert client.zrange(queue.keys.dead, 0, -1) == [b"new"]
    assert client.exists(queue.keys.request("old"), queue.keys.tokens("old")) == 0
    assert queue.state("new") is RequestState.DEAD


def test_dead_letters_are_kept_for_ever_if_asked(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "dead_ttl_ms", "0")
    bury(client, queue, "a")
    client.zadd(queue.keys.dead, {"a": 1})
    assert queue.reap().purged == 0
    assert queue.state("a") is RequestState.DEAD


# --- backoff


def test_after_a_second_crash_a_request_waits_ever_longer(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "crash_backoff_ms", "100000")
    put(queue, "a")
    crash(client, queue, queue.take_batch(ROOM))
    assert queue.contains("a"), "the first crash delays nothing"
    crash(client, queue, queue.take_batch(ROOM))
    assert queue.take_batch(ROOM) == []
    assert queue.state("a") is RequestState.WAITING
    due = client.zscore(queue.keys.delayed, "a")
    assert 30_000 < due - time.time() * 1000 <= 60_000, "no longer than a minute"
    client.hset(queue.keys.config, "crash_backoff_ms", "15000")
    client.zadd(queue.keys.delayed, {"a": 1})
    crashing = RequestQueue(client, max_crashes=100)
    crash(client, crashing, crashing.take_batch(ROOM))
    due = client.zscore(queue.keys.delayed, "a")
    assert 15_000 < due - time.time() * 1000 <= 30_000, "twice the first"


def test_what_is_given_back_waits_for_nothing(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "crash_backoff_ms", "100000")
    put(queue, "a")
    for _ in range(5):
        queue.release([held(claim) for claim in queue.take_batch(ROOM)])
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_a_deadline_ends_what_waits_after_a_crash(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "crash_backoff_ms", "100000")
    put(queue, "a", deadline_ms=100_000)
    for _ in range(2):
        crash(client, queue, queue.take_batch(ROOM))
    client.zadd(queue.keys.deadlines, {"a": 1})
    assert queue.reap().ended == 1
    assert queue.state("a") is RequestState.EXPIRED
    assert client.zcard(queue.keys.delayed) == 0


def test_a_deadline_ends_what_is_delayed(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", deadline_ms=1, delay_ms=100_000)
    time.sleep(0.01)
    assert queue.reap().ended == 1
    assert queue.state("a") is RequestState.EXPIRED
    assert client.zcard(queue.keys.delayed) == client.zcard(queue.keys.deadlines) == 0


# --- claims whose reply was lost


class LosingQueue(RequestQueue):
    """Loses the reply to a script while `loses` is set."""

    loses = False

    def run(self, call: Any) -> Any:
        reply = super().run(call)
        if self.loses:
            raise ConnectionError("the reply was lost")
        return reply


@pytest.fixture
def losing(client: Any) -> LosingQueue:
    return LosingQueue(client, worker_id="w1")


def lose(losing: LosingQueue) -> None:
    losing.loses = True
    with pytest.raises(ConnectionError):
        losing.take_batch(ROOM)
    losing.loses = False


def crashes_of(queue: RequestQueue, request_id: str) -> str | None:
    return queue.run(lookups.record(queue.keys, request_id)).get("crashes")


def test_a_lost_reply_to_a_claim_is_no_crash_of_a_worker_that_lives(losing: LosingQueue) -> None:
    put(losing, "a")
    put(losing, "b")
    lose(losing)
    assert losing.state("a") is RequestState.ACTIVE
    claims = losing.take_batch(ROOM)
    assert ids(claims) == ["a", "b"]
    assert [claim.attempt for claim in claims] == [2, 2]
    assert crashes_of(losing, "a") is None
    assert history_of(losing, "a")[0]["how"] == "its claim was lost"
    assert losing.publish([row(claims[0], 0)]).rows == ["ok"]
    assert losing.take_batch(ROOM) == [], "what was answered is not taken back"
    assert losing.state("b") is RequestState.ACTIVE


def test_replies_lost_again_and_again_are_noticed(losing: LosingQueue) -> None:
    put(losing, "z")
    (kept,) = losing.take_batch(ROOM)
    put(losing, "a")
    for _ in range(3):
        lose(losing)
    assert ids(losing.take_batch(ROOM)) == ["a"]
    assert losing.publish([row(kept, 0)]).rows == ["ok"]


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_call_that_is_sent_twice_gives_the_same_twice(
    client: Any, queue: RequestQueue, is_paused: bool
) -> None:
    """redis-py does that when the connection breaks before the reply; the client may read either
    reply.
    """
    for name in "abc":
        put(queue, name)
    (earlier,) = queue.take_batch(Room(1, 10**9))
    queue.publish([row(earlier, 0)])
    queue.release([held(earlier)])
    two, any_model = Room(2, 10**9), ModelIdentity()
    context = ClaimContext(session="s", number=1)
    call = scripts.claim("w1", 10_000, two, "nonce", "seed", any_model, context)
    first = queue.run(call)
    client.hset(queue.keys.config, "paused", int(is_paused))
    second = queue.run(call)
    for claims in (first, second):
        for claim in claims:
            claim.claimed_at_ms = 0
    assert first == second
    assert ids(first) == ["a", "b"]
    assert [len(claim.events) for claim in first] == [1, 0]
    rows = [row(claim, claim.num_logged) for claim in (*first, *second)]
    assert queue.publish(rows).rows == ["ok", "ok", "duplicate", "duplicate"]
    assert queue.state("c") is RequestState.WAITING
    assert "its claim was lost" not in str([history_of(queue, name) for name in "ab"])


def test_a_repeated_call_does_not_bring_back_what_it_gave_and_another_has(
    queue: RequestQueue,
) -> None:
    put(queue, "a")
    one, any_model = Room(1, 10**9), ModelIdentity()
    context = ClaimContext(session="s", number=1)
    call = scripts.claim("w1", 10_000, one, "nonce", "seed", any_model, context)
    queue.release([held(claim) for claim in queue.run(call)])
    (others,) = queue.take_batch(ROOM)
    assert queue.run(call) == []
    assert queue.publish([row(others, 0)]).rows == ["ok"]


class LateQueue(RequestQueue):
    """While `is_late`, what it sends is on its way until `arrive`, and nobody waits for it."""

    is_late = False

    def run(self, call: Any) -> Any:
        if self.is_late:
            self.on_its_way = call
            raise ConnectionError("the connection broke")
        return super().run(call)

    def arrive(self) -> Any:
        return super().run(self.on_its_way)


def test_a_call_that_comes_after_the_next_one_takes_nothing(
    client: Any, queue: RequestQueue
) -> None:
    """Nobody would know of what it took, nor does it take back what the next one gave."""
    for name in "abc":
        put(queue, name)
    late = LateQueue(client, worker_id="w1")
    one = Room(1, 10**9)
    (a,) = late.take_batch(one)
    late.is_late = True
    with pytest.raises(ConnectionError):
        late.take_batch(one)
    late.is_late = False
    (b,) = late.take_batch(one)
    assert late.arrive() == []
    assert late.publish([row(a, 0), row(b, 0)]).rows == ["ok", "ok"]
    assert queue.state("c") is RequestState.WAITING
    assert ids(late.take_batch(one)) == ["c"]
    assert [history_of(queue, name) for name in "abc"] == [[], [], []]


def test_what_a_late_call_takes_comes_back_with_the_next_claim(
    client: Any, queue: RequestQueue
) -> None:
    """Where the one that overtook it gave nothing, the server cannot know that it is late."""
    late = LateQueue(client, worker_id="w1")
    late.is_late = True
    with pytest.raises(ConnectionError):
        late.take_batch(ROOM)
    late.is_late = False
    assert late.take_batch(ROOM) == []
    put(queue, "a")
    assert ids(late.arrive()) == ["a"]
    (claim,) = late.take_batch(ROOM)
    assert (claim.request_id, claim.attempt) == ("a", 2)
    assert crashes_of(queue, "a") is None


def test_what_another_worker_took_over_meanwhile_stays_there(
    client: Any, queue: RequestQueue, losing: LosingQueue
) -> None:
    """A frozen worker's lost claim ran out, and counted as its crash."""
    put(queue, "a")
    lose(losing)
    client.zadd(queue.keys.leases, {"a": 1})
    queue.reap()
    other = RequestQueue(client, worker_id="w2")
    (claim,) = other.take_batch(ROOM)
    assert losing.take_batch(ROOM) == []
    assert other.publish([row(claim, 0)]).rows == ["ok"]


def test_what_ended_meanwhile_does_not_come_back(
    client: Any, queue: RequestQueue, losing: LosingQueue
) -> None:
    put(queue, "a")
    lose(losing)
    queue.cancel("a")
    client.zadd(queue.keys.leases, {"a": 1})
    queue.reap()
    assert losing.take_batch(ROOM) == []
    assert queue.state("a") is RequestState.CANCELLED


def test_another_process_of_the_same_name_takes_nothing_back(client: Any) -> None:
    one, other = RequestQueue(client, worker_id="w"), RequestQueue(client, worker_id="w")
    put(one, "a")
    (claim,) = one.take_batch(ROOM)
    put(one, "b")
    assert ids(other.take_batch(ROOM)) == ["b"]
    assert one.publish([row(claim, 0)]).rows == ["ok"]


class BesideQueue(RequestQueue):
    """Makes a second claim while the first one's reply is on its way."""

    beside: list[Claim] | None = None

    def run(self, call: Any) -> Any:
        reply = super().run(call)
        if self.beside is None:
            self.beside = []
            self.beside = self.take_batch(Room(1, 10**9))
        return reply


def test_claims_beside_each_other_take_nothing_from_each_other(
    client: Any, queue: RequestQueue
) -> None:
    for name in "abc":
        put(queue, name)
    several = BesideQueue(client)
    claims = several.take_batch(Room(1, 10**9))
    claims += several.beside or []
    claims += several.take_batch(Room(1, 10**9))
    assert ids(claims) == ["a", "b", "c"]
    assert several.publish([row(claim, 0) for claim in claims]).rows == ["ok"] * 3


def test_what_the_server_remembers_of_claims_expires(client: Any) -> None:
    queue = RequestQueue(client, lease_ms=60_000)
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    kept = [key for key in client.keys("*") if client.ttl(key) < 0]
    prefix = queue.keys.prefix.encode()
    assert kept == [prefix + b"outputs"]
