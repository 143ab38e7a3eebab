"""A queue as its callers see it: waiting, looking, closing, and the same with asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from promptq.shared.errors import QueueClosedError
from promptq.shared.protocol.claims import Claim, Claims, Room
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import RequestState
from promptq.shared.protocol.rows import RowStatus
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import lookups, scripts
from promptq.shared.queue.claim_history import ClaimHistory
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue
from tests.support.network import Network
from tests.support.requests import ROOM, held, ids, new, put, row
from tests.support.roles import as_role
from tests.support.servers import Server


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


def test_workers_leave_each_other_a_share_of_what_waits(queue: RequestQueue) -> None:
    """Of all that waits, tenants' queues included. One that has its share goes on slowly, since the
    others may have no room."""
    for at in range(48):
        put(queue, f"id-{at:02}", **({"tenant": "ann"} if at % 2 else {}))
    room = Room(max_count=40, token_budget=10**6, num_sharing=2)
    assert len(queue.take_batch(replace(room, max_count=5))) == 5
    held = 5
    for more in (19, 3, 3, 3, 2):
        assert len(queue.take_batch(replace(room, num_held=held))) == more
        held += more
    other_one = len(queue.take_batch(room))
    assert (held, other_one) == (35, 13)
    for at in range(3):
        put(queue, f"more-{at}")
    many = replace(room, num_sharing=100)
    assert len(queue.take_batch(replace(many, num_held=held))) == 1
    assert len(queue.take_batch(replace(many, num_held=0))) == 1
    assert len(queue.take_batch(replace(room, num_sharing=1, num_held=held))) == 1


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


def test_a_worker_that_stops_reporting_is_forgotten(client: Any, queue: RequestQueue) -> None:
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="gone"), ttl_ms=1)) == 1
    time.sleep(0.01)
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="here", pid=7), ttl_ms=60_000)) == 1
    assert queue.run(lookups.live_worker_ids(queue.keys, 0)) == ["here"]
    assert queue.run(lookups.worker_stats(queue.keys, "gone")) is None
    told = queue.run(lookups.worker_stats(queue.keys, "here"))
    assert told is not None
    assert told.pid == 7
    assert 0 < client.pttl(queue.keys.worker("here")) <= 60_000
    assert queue.run(scripts.heartbeat(WorkerStats(worker_id="here"), ttl_ms=0)) == 0
    assert queue.run(lookups.worker_stats(queue.keys, "here")) is None


class Forgetting(redis.Redis):
    """Its server starts again just after it was told a script, so often."""

    restarts = 2

    def script_load(self, script: str) -> Any:
        sha = super().script_load(script)
        if self.restarts > 0:
            self.restarts -= 1
            self.script_flush()
        return sha


class AsyncForgetting(redis.asyncio.Redis):
    restarts = 2

    async def script_load(self, script: str) -> Any:
        sha = await super().script_load(script)
        if self.restarts > 0:
            self.restarts -= 1
            await self.script_flush()
        return sha


async def test_a_server_that_restarts_while_a_script_is_loaded(embedded_url: str) -> None:
    with Forgetting.from_url(embedded_url) as client:
        client.flushall()
        client.script_flush()
        put(RequestQueue(client), "a")
        assert client.restarts == 0
        client.script_flush()
    async with AsyncForgetting.from_url(embedded_url) as async_client:
        queue = AsyncRequestQueue(async_client)
        assert ids(await queue.take_batch(ROOM)) == ["a"]
        assert async_client.restarts == 0
        async_client.restarts = 100
        await async_client.script_flush()
        with pytest.raises(NoScriptError):
            await queue.take_batch(ROOM)


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


def test_a_late_reply_makes_nothing_look_earlier_on_the_servers_clock(redis_url: str) -> None:
    network = Network(redis.connection.parse_url(redis_url)["port"])
    client = redis.Redis.from_url(as_role("", network.address))
    queue, claims = RequestQueue(client), []
    for delay in (0.0, 0.3):
        put(queue)
        network.slow(delay)
        claims += queue.take_batch(ROOM)
    client.close()
    network.close()
    quick, late = (claim.received_at - claim.claimed_at_ms / 1000 for claim in claims)
    assert late == pytest.approx(quick, abs=0.01)


def test_a_server_whose_clock_was_set_back_is_followed_at_once() -> None:
    history, found = ClaimHistory(), []
    for claimed_at_ms in (100_000, 40_000):
        with history.call() as turn:
            turn.claims = Claims([claim_at(claimed_at_ms, received_at=500.0)])
        found.append(turn.claims[0].received_at)
    assert found == [500.0, 500.0]


def claim_at(claimed_at_ms: int, received_at: float) -> Claim:
    numbers = {"attempt": 1, "score": 0.0, "seed": 0, "enqueued_at_ms": 0, "cost": 1}
    return Claim(
        request_id="a",
        payload=b"{}",
        fence="1-a",
        claimed_at_ms=claimed_at_ms,
        prompt_tokens=None,
        received_at=received_at,
        **numbers,
    )
