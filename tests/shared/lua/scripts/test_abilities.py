"""A request that a worker's engine cannot serve is left to a worker whose engine can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from promptq.shared.protocol.claims import Claim, Room
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, ids, put

SCHEMAS, BIAS = "response_format tool_choice", "logit_bias"


def room(refused: str) -> Room:
    return Room(max_count=1000, token_budget=10**9, refused=refused.split())


def report(queue: RequestQueue, worker: str, refused: str, ttl_ms: int = 60_000) -> None:
    queue.run(scripts.heartbeat(WorkerStats(worker_id=worker, refused=refused), ttl_ms))


def leave(queue: RequestQueue, claim: Claim, field: str) -> str:
    (status,) = queue.run(scripts.release([held(claim)], needs=[field]))
    return status


def claimed_and_left(queue: RequestQueue, request_id: str) -> str:
    """Returns what becomes of a request that a worker without schemas claims."""
    put(queue, request_id)
    (claim,) = queue.take_batch(room(SCHEMAS))
    return leave(queue, claim, "response_format")


def test_it_waits_for_a_worker_that_serves_it_and_others_are_claimed_past_it(
    queue: RequestQueue,
) -> None:
    report(queue, "w1", SCHEMAS)
    report(queue, "w2", "")
    assert claimed_and_left(queue, "schema") == "waiting"
    put(queue, "plain")
    assert ids(queue.take_batch(room(SCHEMAS))) == ["plain"]
    (claim,) = queue.take_batch(room(""))
    assert (claim.request_id, claim.attempt) == ("schema", 2)


def test_it_stays_where_it_is_if_no_live_worker_serves_it(queue: RequestQueue) -> None:
    report(queue, "w1", SCHEMAS)
    assert claimed_and_left(queue, "schema") == "unserved"
    assert queue.take_batch(ROOM) == [], "w1 holds it, and says why it refuses it"


def test_it_is_claimed_to_be_refused_when_the_workers_that_served_it_are_gone(
    queue: RequestQueue,
) -> None:
    report(queue, "w1", SCHEMAS)
    report(queue, "w2", "")
    assert claimed_and_left(queue, "schema") == "waiting"
    assert queue.take_batch(room(SCHEMAS)) == []
    report(queue, "w2", "", ttl_ms=0)
    assert ids(queue.take_batch(room(SCHEMAS))) == ["schema"]


def test_all_that_it_needs_counts(queue: RequestQueue) -> None:
    """Each worker names only one field."""
    for worker, refused in (("w1", SCHEMAS), ("w2", BIAS)):
        report(queue, worker, refused)
    assert claimed_and_left(queue, "both") == "waiting"
    (claim,) = queue.take_batch(room(BIAS))
    assert leave(queue, claim, BIAS) == "unserved"
    report(queue, "w3", "embed")
    assert leave(queue, claim, BIAS) == "waiting"
    assert queue.take_batch(room(SCHEMAS)) == queue.take_batch(room(BIAS)) == []
    assert ids(queue.take_batch(room("embed"))) == ["both"]


def test_workers_of_earlier_releases_count_as_able(client: Any, queue: RequestQueue) -> None:
    report(queue, "old", "")
    client.hdel(queue.keys.worker("old"), "refused")
    report(queue, "w1", SCHEMAS)
    assert claimed_and_left(queue, "schema") == "waiting"
    assert queue.take_batch(room(SCHEMAS)) == []
    assert ids(queue.take_batch(ROOM)) == ["schema"]


def test_a_member_without_a_record_counts_as_no_worker(client: Any, queue: RequestQueue) -> None:
    report(queue, "w1", SCHEMAS)
    report(queue, "evicted", "")
    client.delete(queue.keys.worker("evicted"))
    client.zadd(queue.keys.workers, {"strange": 2**53, "typed": 2**53})
    client.set(queue.keys.worker("typed"), "text")
    assert claimed_and_left(queue, "schema") == "unserved"


def test_a_worker_on_standby_may_serve_it(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.model, "standby_until", 2**48)
    put(queue, "schema")
    put(queue, "vector")
    claims = {claim.request_id: claim for claim in queue.take_batch(room(SCHEMAS))}
    assert leave(queue, claims["schema"], "response_format") == "waiting"
    assert leave(queue, claims["vector"], "embed") == "unserved"
    client.hset(queue.keys.model, "standby_until", 1)
    assert ids(queue.take_batch(room(SCHEMAS))) == ["schema"]


def test_claims_continue_behind_many_that_are_for_others(client: Any, queue: RequestQueue) -> None:
    report(queue, "w2", "")
    for number in range(560):
        put(queue, f"a{number}")
        client.hset(queue.keys.request(f"a{number}"), "needs", "response_format")
    for number in range(3):
        put(queue, f"z{number}")
    one = replace(room(SCHEMAS), max_count=1)
    taken = [ids(queue.take_batch(one)) for _ in range(6)]
    assert taken == [[], ["z0"], ["z1"], ["z2"], [], []]
    client.hset(queue.keys.request("a0"), "cancelled", 1)
    queue.take_batch(one)
    assert client.hget(queue.keys.request("a0"), "state") == b"cancelled", "it begins anew"


def test_a_cancelled_one_ends(queue: RequestQueue) -> None:
    report(queue, "w2", "")
    put(queue, "schema")
    (claim,) = queue.take_batch(room(SCHEMAS))
    queue.cancel("schema")
    assert leave(queue, claim, "response_format") == "cancelled"
    assert leave(queue, claim, "response_format") == "finished"
