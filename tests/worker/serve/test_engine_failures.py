"""An engine that fails gives back what it ran, and what made it fail comes to run alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import redis.asyncio

from promptq.shared.protocol.request import NewRequest, Request, RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.serve.worker import Worker
from tests.support.model_free import (
    ModelFreeRunner,
    ModelFreeStep,
    finished,
    running_worker,
    served_model_free,
    text_of,
)
from tests.support.requests import async_put, until_tokens
from tests.support.roles import as_role


class FailingRunner(ModelFreeRunner):
    """Does nothing any more once it has met the token `!`."""

    is_broken = False

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        if any(ord("!") in share.sequence.token_ids for share in batch.scheduled):
            self.is_broken = True
        if self.is_broken:
            raise RuntimeError("device-side assert")
        return super().launch(batch, after)


async def test_what_makes_engines_fail_becomes_a_dead_letter(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Else it would go from worker to worker for ever."""
    request_id = await async_put(queue, prompt="!")
    for _ in range(2):
        engine = LLMEngine(FailingRunner(), max_num_seqs=4, max_num_batched_tokens=64)
        served = replace(served_model_free(), engine=engine)
        async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
            worker = Worker(WorkerSettings(lease_ms=1000, max_crashes=2), served, client)
            await worker.start()
            with pytest.raises(RuntimeError, match="device-side assert"):
                await worker.serve(asyncio.Event())
            untouched = await async_put(queue, prompt="waits")
            await worker.stop()
        assert await queue.state(untouched) is RequestState.WAITING
        await queue.remove(untouched)
    async with running_worker(redis_url, lease_ms=1000, max_crashes=2):
        result = await finished(queue, request_id)
    assert result["error"]["type"] == "dead_letter"


async def test_a_failing_engine_gives_back_at_once_what_it_was_running(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Counted as a crash of each, with no wait for leases to run out."""
    innocent = await async_put(queue, prompt="a", seed=3, max_tokens=50)
    engine = LLMEngine(FailingRunner(step_seconds=0.01), max_num_seqs=4, max_num_batched_tokens=64)
    served = replace(served_model_free(), engine=engine)
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        worker = Worker(WorkerSettings(), served, client)
        await worker.start()
        await until_tokens(queue, innocent, 3)
        poison = await async_put(queue, prompt="!")
        with pytest.raises(RuntimeError, match="device-side assert"):
            await worker.serve(asyncio.Event())
        await worker.stop()
    for request_id in (innocent, poison):
        assert await queue.state(request_id) is RequestState.WAITING
        record = await queue.run(lookups.record(queue.keys, request_id))
        assert record["crashes"] == "1"
    await queue.remove(poison)
    async with running_worker(redis_url):
        assert (await finished(queue, innocent))["text"] == text_of(3, 50)


async def test_a_suspect_has_its_worker_to_itself(redis_url: str, queue: AsyncRequestQueue) -> None:
    """Others wait until it is done, be they more urgent, and then run together."""
    served = served_model_free(step_seconds=0.005)
    suspect = await async_put(queue, seed=1, max_tokens=60)
    await queue.redis.hset(queue.keys.request(suspect), "suspect", 1)
    async with running_worker(redis_url, served) as worker:
        await until_tokens(queue, suspect, 3)
        others = [await async_put(queue, seed=n, max_tokens=5, priority=-n) for n in range(5)]
        while await queue.state(suspect) is RequestState.ACTIVE:
            assert len(worker.leases) <= 1
            await asyncio.sleep(0.002)
        for n, request_id in enumerate(others):
            assert (await finished(queue, request_id))["text"] == text_of(n, 5)
    assert (await finished(queue, suspect))["text"] == text_of(1, 60)


async def test_a_suspect_gets_its_turn_at_a_busy_worker(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=2, step_seconds=0.001)
    async with running_worker(redis_url, served, prefetch_depth=0) as worker:
        first = await async_put(queue, max_tokens=200)
        await until_tokens(queue, first, 1)
        suspect = new_request_id()
        await queue.redis.hset(queue.keys.request(suspect), "suspect", 1)
        request = Request.build({"prompt": "a", "max_tokens": 20})
        new = [NewRequest(new_request_id(), request) for _ in range(60)]
        _, *others = await queue.enqueue([NewRequest(suspect, request), *new])
        while not (state := await queue.state(suspect)) or not state.is_final:
            assert state is not RequestState.ACTIVE or len(worker.leases) <= 1
            await asyncio.sleep(0.0005)
        states = [await queue.state(request_id) for request_id in others]
        assert RequestState.WAITING in states, "it was not left to the end"
        for request_id in others:
            await finished(queue, request_id)
