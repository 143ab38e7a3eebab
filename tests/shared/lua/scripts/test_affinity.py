"""A worker claims first what it holds, and leaves for a moment what another worker holds."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, new, put, put_plainly, row

LOOK_AHEAD = 64
MOST_OVERTAKING = 32
ONE = Room(max_count=1, token_budget=10**9)
NOBODYS = "f" * 16


def hash_of(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def put_of(
    queue: RequestQueue,
    request_id: str,
    session: str = "",
    prefixes: Sequence[str] = (),
    **fields: Any,
) -> None:
    """Enqueues a request with the hashes of these names."""
    affinity = " ".join([hash_of(session) if session else "-", *map(hash_of, prefixes)])
    queue.enqueue([replace(new(request_id, **fields), affinity=affinity)])


def let_live(queue: RequestQueue, num_running: int = 0, num_slots: int = 4) -> None:
    """Reports that the queue's worker lives and runs some requests."""
    stats = WorkerStats(
        worker_id=queue.worker_id, state="running", max_num_seqs=num_slots, num_running=num_running
    )
    queue.run(scripts.heartbeat(stats, 10_000))


@pytest.fixture(autouse=True)
def _on(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.config, "affinity_ms", 5000)


@pytest.fixture
def other(client: Any, queue: RequestQueue) -> RequestQueue:
    """Returns the queue of a second worker, which lives and has room."""
    other = RequestQueue(client, worker_id="w2")
    let_live(other)
    return other


def wait_over(client: Any, queue: RequestQueue, request_id: str) -> None:
    """Lets the time pass for which workers leave a request to another one."""
    key = queue.keys.request(request_id)
    client.hset(key, "left_at", int(client.hget(key, "left_at")) - 5000)


def test_a_worker_takes_first_what_it_holds(queue: RequestQueue) -> None:
    """The session counts more than a prefix, and a long prefix more than a short one."""
    put_of(queue, "a", "s", ["short", "long"])
    assert ids(queue.take_batch(ONE)) == ["a"]
    put_of(queue, "b", "t", ["other"])
    put_of(queue, "c", "t", ["short", "other"])
    put_of(queue, "d", "t", ["short", "long", "other"])
    put_of(queue, "e", "s")
    put(queue, "f")
    assert ids(queue.take_batch(ROOM)) == ["e", "d", "b", "c", "f"]  # d made it hold "t", too


def test_sessions_run_in_the_order_of_their_beginning(
    client: Any, queue: RequestQueue, other: RequestQueue
) -> None:
    """First those that the worker holds, then those of lost workers, then new ones."""
    for session in "stu":
        put_of(queue, f"{session}0", session)
        time.sleep(0.002)  # sessions that begin in one millisecond are equal
    assert ids(queue.take_batch(ONE)) == ["s0"]
    other.take_batch(ROOM)
    put_of(queue, "new0", "new")
    put_of(queue, "u1", "u")
    assert ids(queue.take_batch(Room(0, 0))) == []
    for n, session in enumerate("uts"):
        put_of(queue, f"{session}{n + 2}", session)
    client.delete(queue.keys.worker("w2"))
    assert ids(queue.take_batch(ROOM)) == ["s4", "t3", "u1", "u2", "new0"]


def test_requests_of_one_claim_find_each_other(queue: RequestQueue) -> None:
    for n in range(3):
        for document in ("x", "y"):
            put_of(queue, f"{n}{document}", prefixes=[document])
    assert ids(queue.take_batch(ROOM)) == ["0x", "1x", "2x", "0y", "1y", "2y"]


def test_a_worker_leaves_for_a_moment_what_another_one_with_room_holds(
    client: Any, queue: RequestQueue, other: RequestQueue
) -> None:
    put_of(queue, "a", "s", ["long"])
    other.take_batch(ROOM)
    put_of(queue, "b", "s")
    put_of(queue, "c", prefixes=["long"])
    left = queue.take_batch(ROOM)
    assert (ids(left), left.num_pending) == ([], 2)
    assert left.next_skip == 1  # so the worker comes again soon
    wait_over(client, queue, "b")
    assert ids(queue.take_batch(ROOM)) == ["b"]
    put_of(queue, "d", prefixes=["long", "longer"])  # of which the other one holds only a part
    assert ids(queue.take_batch(ROOM)) == ["d", "c"]  # now this one holds that part, too


@pytest.mark.parametrize("state", ["dead", "draining"])
def test_nothing_is_left_for_a_worker_that_cannot_take_it(
    client: Any, queue: RequestQueue, other: RequestQueue, state: str
) -> None:
    put_of(queue, "a", "s")
    other.take_batch(ROOM)
    if state == "dead":
        client.delete(queue.keys.worker("w2"))
    else:
        client.hset(queue.keys.worker("w2"), "state", state)
    put_of(queue, "b", "s")
    assert ids(queue.take_batch(ROOM)) == ["b"]


def test_only_sessions_are_left_for_a_full_worker(
    client: Any, queue: RequestQueue, other: RequestQueue
) -> None:
    put_of(queue, "a", "s", ["long"])
    other.take_batch(ROOM)
    let_live(other, num_running=4)
    put_of(queue, "b", "t", ["long"])
    put_of(queue, "c", "s", ["long"])
    assert ids(queue.take_batch(ROOM)) == ["b"]
    wait_over(client, queue, "c")
    assert ids(queue.take_batch(ROOM)) == ["c"]


def test_a_claim_says_what_affinity_did(
    client: Any, queue: RequestQueue, other: RequestQueue
) -> None:
    """The session decides, or else the longest beginning that some worker claimed."""

    def outcomes() -> dict[str, str]:
        return {claim.request_id: claim.affinity for claim in queue.take_batch(ROOM)}

    put_of(queue, "a", "s", ["short", "long"])
    other.take_batch(ROOM)
    put_of(queue, "b", "t", ["short"], tenant="them")
    put_of(queue, "c", "t", ["short", "new"])
    put(queue, "d")
    put_of(queue, "e", "s", ["short"])
    assert outcomes() == {"b": "", "c": "missed", "d": ""}
    wait_over(client, queue, "e")
    assert outcomes() == {"e": "left missed"}
    put_of(queue, "f", "s", ["long"])
    put_of(queue, "g", "u", ["short"])
    assert outcomes() == {"f": "held", "g": "held"}


def test_what_ran_before_is_left_to_nobody(queue: RequestQueue, other: RequestQueue) -> None:
    put_of(queue, "a", "s")
    (claim,) = other.take_batch(ROOM)
    other.release([held(claim)])
    assert ids(queue.take_batch(ROOM)) == ["a"]


def test_priorities_and_their_order_stay(queue: RequestQueue) -> None:
    put_of(queue, "a", "s")
    queue.take_batch(ROOM)
    put_of(queue, "later", "s", priority=1)
    put_of(queue, "b", priority=0)
    put_of(queue, "urgent", priority=-1)
    put_of(queue, "c", "s")
    assert ids(queue.take_batch(ROOM)) == ["urgent", "c", "b", "later"]


def test_tenants_are_apart_and_take_turns(queue: RequestQueue, other: RequestQueue) -> None:
    put_of(queue, "a", "s", tenant="them")
    other.take_batch(ROOM)
    for n in range(3):
        put_of(queue, f"us{n}", "s", tenant="us")
        put_of(queue, f"them{n}", "s", tenant="them")
    assert ids(queue.take_batch(ROOM)) == ["us0", "us1", "us2"]  # of "us", nobody holds "s"
    assert ids(other.take_batch(ROOM)) == ["them0", "them1", "them2"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_request_is_overtaken_by_a_bounded_number(
    client: Any, queue: RequestQueue, num_workers: int
) -> None:
    """The bound grows with the number of live workers, as these serve the others as quickly."""
    client.zadd(queue.keys.workers, dict.fromkeys(map(str, range(num_workers)), 10**14))
    put_of(queue, "a", "s")
    queue.take_batch(ROOM)
    put_of(queue, "b")
    order = []
    for n in range(3 * MOST_OVERTAKING):
        put_of(queue, f"s{n:02}", "s")
        order += ids(queue.take_batch(ONE))
    assert order.index("b") == num_workers * MOST_OVERTAKING


def test_plain_requests_are_not_overtaken(client: Any, queue: RequestQueue) -> None:
    put_of(queue, "a", "s")
    queue.take_batch(ROOM)
    put_plainly(client, queue, "plain", 1, '{"prompt":"a"}')
    put_of(queue, "b", "s")
    assert ids(queue.take_batch(ROOM)) == ["plain", "b"]


def test_a_claim_looks_ahead_so_far_and_no_further(queue: RequestQueue) -> None:
    put_of(queue, "a", "s")
    queue.take_batch(ROOM)
    for n in range(LOOK_AHEAD):
        put_of(queue, f"{n:02}")
    put_of(queue, "s", "s")
    assert ids(queue.take_batch(Room(2, 10**9))) == ["00", "s"]


def test_no_tenant_has_the_key_of_a_workers_last_claim(client: Any) -> None:
    queue = RequestQueue(client, worker_id=hash_of("s"))
    put_of(queue, "a", "s", tenant="worker")
    queue.take_batch(ONE)
    written = [key.decode() for key in client.scan_iter(f"{queue.keys.prefix}holder:*")]
    assert len(written) == 2, "the session's workers, and what the worker held"


def test_an_oversized_request_still_gets_room(queue: RequestQueue) -> None:
    """After the bound, further requests pass it at most eight times, as without affinity."""
    put_of(queue, "a", "s")
    queue.take_batch(ROOM)
    put_of(queue, "large", prompt="x" * 40_000)
    small = Room(max_count=1, token_budget=2000)
    passed = []
    for n in range(60):
        put_of(queue, f"s{n:02}", "s", max_tokens=1)
        passed += ids(queue.take_batch(small))
    assert len(passed) == MOST_OVERTAKING + 8
    assert ids(queue.take_batch(ROOM))[0] == "large"


def test_a_lost_reply_is_answered_again(client: Any, queue: RequestQueue) -> None:
    for n in range(4):
        put_of(queue, f"{n}", "st"[n % 2])
    claims = ids(queue.take_batch(ROOM))
    again = RequestQueue(client, worker_id="w1")
    assert claims == ["0", "2", "1", "3"]
    assert again.take_batch(ROOM) == []


def num_commands(client: Any) -> int:
    """Returns the number of commands that the server has run, in scripts and elsewhere."""
    stats = client.info("commandstats")
    ignored = ("cmdstat_info", "cmdstat_evalsha", "cmdstat_client", "cmdstat_hello")
    return sum(each["calls"] for name, each in stats.items() if not name.startswith(ignored))


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_an_attacker_gains_and_costs_little(
    client: Any, queue: RequestQueue, other: RequestQueue
) -> None:
    """Forged, malformed and huge hashes change nothing but the order within bounds."""
    rng = random.Random(1)
    forged = [
        hash_of("s"), " ".join([hash_of("s")] * 1000), "\0" * 100, "-" * 10**5, "g" * 16, "{",
        " ".join(["-", *(f"{rng.getrandbits(64):016x}" for _ in range(4))]),
        f"{hash_of('s')} {'0' * 15} {'1' * 17} {hash_of('x')}", "%x", "*", "- * ?",
    ]  # fmt: skip
    put_of(queue, "a", "s", ["x"], tenant="them")
    other.take_batch(ROOM)
    put_of(queue, "honest", tenant="them")
    for n in range(99):
        queue.enqueue([replace(new(f"{n:03}", tenant="them"), affinity=forged[n % len(forged)])])
    for key in ("x", "y"):
        holder = f"{queue.keys.prefix}holder:them:{hash_of(key)}"
        client.delete(holder)
        client.lpush(holder, "not a text")
    order, most = [], 0
    for _ in range(99):
        before = num_commands(client)
        claims = queue.take_batch(ONE)
        most = max(most, num_commands(client) - before)
        order += ids(claims)
        for claim in claims:
            queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert order.index("honest") <= MOST_OVERTAKING
    assert len({*order}) == len(order) >= 80
    assert most <= 3 * LOOK_AHEAD
    written = {*client.scan_iter(f"{queue.keys.prefix}holder:them:*", 1000)}
    assert written
    assert all(len(key.decode().rsplit(":", 1)[1]) == 16 for key in written)


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_without_the_setting_hashes_cost_no_command(client: Any, queue: RequestQueue) -> None:
    client.hdel(queue.keys.config, "affinity_ms")
    counts = []
    for session in ("", "s"):
        for n in range(8):
            put_of(queue, f"{session}{n}", session, [session])
        before = num_commands(client)
        claims = queue.take_batch(ROOM)
        counts.append(num_commands(client) - before)
        queue.publish([row(claim, 0, reason=FinishReason.STOP) for claim in claims])
    assert counts[0] == counts[1]


def test_without_the_setting_nothing_is_kept(
    client: Any, queue: RequestQueue, other: RequestQueue
) -> None:
    client.hdel(queue.keys.config, "affinity_ms")
    put_of(queue, "a", "s")
    other.take_batch(ROOM)
    put_of(queue, "b")
    put_of(queue, "c", "s")
    assert ids(queue.take_batch(ROOM)) == ["b", "c"]
    assert not [*client.scan_iter(f"{queue.keys.prefix}holder:*")]
