"""A worker that is told to end finishes what runs, or gives it back with its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from promptq import AsyncClient
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.server.connection import open_async_redis
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.worker import Worker
from tests.support.model_free import (
    BY_ITSELF,
    finished,
    running_worker,
    served_model_free,
    text_of,
)
from tests.support.network import Network
from tests.support.requests import async_log_of, async_num_tokens, async_put, until_tokens
from tests.support.roles import as_role
from tests.support.servers import in_database
from tests.support.waiting import async_until


async def test_a_drained_worker_gives_back_with_progress_and_another_goes_on(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=2, step_seconds=0.005)
    async with running_worker(redis_url, served, drain_seconds=0.0, **BY_ITSELF):
        requests = [await async_put(queue, seed=n, max_tokens=1000) for n in range(6)]
        await until_tokens(queue, requests[0], 10)
    assert await queue.count() == 6
    async with running_worker(redis_url, **BY_ITSELF):
        for n, request_id in enumerate(requests):
            result = await finished(queue, request_id)
            assert result["text"] == text_of(n, 1000)
        events = await async_log_of(queue, requests[0])
        assert [event["index"] for event in events] == list(range(1000))
        assert {event["attempt"] for event in events} == {1, 2}


async def test_draining_finishes_what_runs(redis_url: str, queue: AsyncRequestQueue) -> None:
    served = served_model_free(max_num_seqs=2, step_seconds=0.002)
    async with running_worker(redis_url, served, drain_seconds=60):
        running = await async_put(queue, seed=3, max_tokens=100)
        await until_tokens(queue, running, 2)
    assert (await finished(queue, running))["text"] == text_of(3, 100)


async def test_a_request_whose_progress_is_complete_only_gets_its_last_event(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """A worker with a longer model left it one token from the length that this one can hold."""
    request_id = await async_put(queue, seed=1, prompt="ab", max_tokens=1000)
    async with running_worker(redis_url, served_model_free(step_seconds=0.005), drain_seconds=0):
        await until_tokens(queue, request_id, 30)
    so_far = await async_num_tokens(queue, request_id)
    served = served_model_free(max_model_len=20)
    async with running_worker(redis_url, served):
        result = await finished(queue, request_id)
    assert result["finish_reason"] == "length"
    assert result["text"] == text_of(1, so_far)


async def test_draining_ends_whenever_it_comes_and_with_every_last_event(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Also when the last token is just on its way, which no cancellation may cut off."""
    served = {"max_num_seqs": 2, "step_seconds": 0.002}
    for n in range(12):
        async with running_worker(redis_url, served_model_free(**served), drain_seconds=60):
            request_id = await async_put(queue, seed=n, max_tokens=8 + n)
            await until_tokens(queue, request_id, 2)
        assert await queue.state(request_id) is RequestState.COMPLETED


async def test_a_drain_ends_workers_of_its_database_alone(redis_url: str) -> None:
    def in_role(role: str, db: int) -> str:
        return as_role(role, in_database(redis_url, db))

    async with (
        redis.asyncio.Redis.from_url(in_role("worker", 1)) as connection,
        AsyncClient(in_role("operator", 0)) as here,
        AsyncClient(in_role("operator", 1)) as there,
    ):
        worker = Worker(WorkerSettings(), served_model_free(), connection)
        await worker.start()
        serving = asyncio.create_task(worker.serve(asyncio.Event()))
        channels = [here.queue.keys.drain, here.queue.keys.control]
        assert [count for _, count in await listeners(redis_url, channels)] == [0, 0]
        assert await here.drain() == []
        assert await there.drain() == [worker.worker_id]
        await serving
        await worker.stop()


async def listeners(url: str, channels: list[str]) -> list[tuple[bytes, int]]:
    async with redis.asyncio.Redis.from_url(as_role("", url)) as client:
        counts: list[tuple[bytes, int]] = await client.pubsub_numsub(*channels)
        return counts


@pytest.mark.parametrize("message", ["drain", "drain:{worker_id}"])
async def test_a_message_drains_the_worker_that_it_names(
    redis_url: str, queue: AsyncRequestQueue, message: str
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        worker = Worker(WorkerSettings(), served_model_free(step_seconds=0.005), client)
        await worker.start()
        serving = asyncio.create_task(worker.serve(asyncio.Event()))
        request_id = await async_put(queue, seed=2, max_tokens=40)
        await until_tokens(queue, request_id, 3)
        await client.publish(queue.keys.drain, "drain:another")
        await asyncio.sleep(0.05)
        assert not serving.done()
        await client.publish(queue.keys.drain, message.format(worker_id=worker.worker_id))
        await serving
        await worker.drain(asyncio.Event())
        await worker.stop()
    assert (await finished(queue, request_id))["text"] == text_of(2, 40)


async def test_a_payload_that_fails_after_an_attempt_ends_behind_what_was_emitted(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    request_id = await async_put(queue, seed=1, max_tokens=1000)
    async with running_worker(redis_url, served_model_free(step_seconds=0.005), drain_seconds=0):
        await until_tokens(queue, request_id, 5)
    so_far = await async_num_tokens(queue, request_id)
    async with running_worker(redis_url, served_model_free(max_model_len=10)):
        result = await finished(queue, request_id)
    assert result["finish_reason"] == "error"
    assert result["error"]["message"].startswith("prompt: ")
    assert result["text"] == text_of(1, so_far)
    assert (await async_log_of(queue, request_id))[-1]["index"] == so_far


async def test_a_second_signal_ends_a_drain_at_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        served = served_model_free(step_seconds=0.01)
        worker = Worker(WorkerSettings(drain_seconds=3600), served, client)
        await worker.start()
        request_id = await async_put(queue, max_tokens=4000)
        await until_tokens(queue, request_id, 2)
        now = asyncio.Event()
        draining = asyncio.create_task(worker.drain(now))
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert worker.heartbeat.stats().state == "draining"
        now.set()
        await draining
        await worker.stop()
    assert await queue.state(request_id) is RequestState.WAITING


@asynccontextmanager
async def cut_off(
    redis_url: str, queue: AsyncRequestQueue, **settings: int
) -> AsyncIterator[tuple[Worker, Network, str]]:
    """A worker that runs a request and cannot reach its server any longer."""
    network = Network(urlsplit(redis_url).port or 0)
    async with await open_async_redis(as_role("worker", network.url)) as client:
        served = served_model_free(step_seconds=0.01)
        worker = Worker(WorkerSettings(**settings), served, client)
        await worker.start()
        request_id = await async_put(queue, seed=1, max_tokens=4000)
        await until_tokens(queue, request_id, 2)
        network.cut()
        yield worker, network, request_id
    network.close()


async def test_a_worker_that_stops_without_its_server_tries_each_call_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Its leases have run out, so nothing can be given back."""
    async with cut_off(redis_url, queue, lease_ms=400) as (worker, network, _):

        async def has_run_out() -> bool:
            seconds, microseconds = await queue.redis.time()
            [(_, ends_at)] = await queue.redis.zrange(queue.keys.leases, 0, -1, withscores=True)
            return bool(ends_at < seconds * 1000 + microseconds / 1000 - 400)

        while not await has_run_out():
            await asyncio.sleep(0.01)
        before = network.num_turned_away
        await worker.stop()
        # The lease and the farewell, and what was under way in the background. With redis-py's
        # retries, one call alone would be eleven.
        assert 2 <= network.num_turned_away - before < 11


async def test_a_worker_that_stops_gives_back_if_its_server_returns_within_the_lease(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with cut_off(redis_url, queue, lease_ms=60_000) as (worker, network, request_id):
        stopping = asyncio.create_task(worker.stop())
        before = network.num_turned_away
        await async_until(lambda: stopping.done() or network.num_turned_away > before + 5)
        network.mend()
        await stopping
    assert await queue.state(request_id) is RequestState.WAITING
