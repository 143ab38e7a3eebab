"""If `has_work` finds nothing, a claim would do nothing, so an idle worker need not claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import RequestQueue
from tests.support.requests import ROOM, held, put, put_plainly


def nothing(client: Any, queue: RequestQueue) -> None:
    """Leaves the queue empty."""


def all_done(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", tenant="acme")
    (claim,) = queue.take_batch(ROOM)
    queue.release([held(claim)])
    queue.cancel("a")
    queue.take_batch(ROOM)


def waiting(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")


def waiting_plainly(client: Any, queue: RequestQueue) -> None:
    put_plainly(client, queue, "a", 1, "{}")


def waiting_of_a_tenant(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", tenant="acme")


def paused(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.run(scripts.set_paused(queue.keys, True))


def running(client: Any, queue: RequestQueue) -> None:
    put(queue, "a")
    queue.take_batch(ROOM)


def running_of_a_tenant(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", tenant="acme")
    queue.take_batch(ROOM)


def delayed(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", delay_ms=3_600_000)


def delayed_and_due(client: Any, queue: RequestQueue) -> None:
    put(queue, "a", delay_ms=3_600_000)
    client.zadd(queue.keys.delayed, {"a": 1})


def count_left_over(client: Any, queue: RequestQueue) -> None:
    client.hset(queue.keys.backlog, "tokens:", 7)


def tenant_left_over(client: Any, queue: RequestQueue) -> None:
    client.sadd(queue.keys.tenants_waiting, "")


def a_stranger_wrote(client: Any, queue: RequestQueue) -> None:
    for key in (queue.keys.tenants_waiting, queue.keys.delayed):
        client.set(key, "x")


IDLE = [nothing, all_done, paused, running, running_of_a_tenant, delayed]
BUSY = [
    *(waiting, waiting_plainly, waiting_of_a_tenant, delayed_and_due),
    *(count_left_over, tenant_left_over, a_stranger_wrote),
]


def contents(client: Any) -> dict[bytes, Any]:
    read = {
        b"hash": client.hgetall,
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
        b"string": client.get,
    }
    return {key: read[client.type(key)](key) for key in client.keys("*")}


@pytest.mark.parametrize("state", IDLE)
def test_where_it_finds_nothing_a_claim_would_do_nothing(
    client: Any, queue: RequestQueue, state: Callable[[Any, RequestQueue], None]
) -> None:
    state(client, queue)
    before = contents(client)
    assert not queue.run(scripts.has_work(""))
    assert contents(client) == before, "it changes nothing"
    assert queue.take_batch(ROOM) == []
    assert contents(client) == before


@pytest.mark.parametrize("state", BUSY)
def test_finds_whatever_a_claim_would_return_or_tidy_up(
    client: Any, queue: RequestQueue, state: Callable[[Any, RequestQueue], None]
) -> None:
    state(client, queue)
    assert queue.run(scripts.has_work(""))


@pytest.mark.parametrize("known", ["", "other"])
def test_leaves_it_to_a_claim_to_write_the_model_or_to_refuse_it(
    client: Any, queue: RequestQueue, known: str
) -> None:
    assert queue.run(scripts.has_work("f"))
    client.hset(queue.keys.model, "fingerprint", "f")
    assert not queue.run(scripts.has_work("f"))
    client.hset(queue.keys.model, "fingerprint", known)
    assert queue.run(scripts.has_work("f"))
    assert not queue.run(scripts.has_work("")), "an overflow worker may have another model"
