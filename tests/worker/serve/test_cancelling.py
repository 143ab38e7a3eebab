"""A cancel, or a deadline, ends a request at its worker."""

from __future__ import annotations

import asyncio

from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.support.model_free import finished, running_worker, served_model_free
from tests.support.requests import async_log_of, async_put, until_tokens
from tests.support.waiting import async_until


async def test_a_cancel_stops_the_stream_and_frees_the_blocks(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)) as worker:
        request_id = await async_put(queue, max_tokens=1000)
        await until_tokens(queue, request_id, 5)
        await queue.cancel(request_id)
        result = await finished(queue, request_id)
        assert result["finish_reason"] == "cancelled"
        count = result["usage"]["completion_tokens"]
        assert 5 <= count < 1000
        assert result["usage"]["prompt_tokens"] == len("Once upon a time")
        await async_until(lambda: not worker.served.engine.stats.num_used_blocks)
        events = await async_log_of(queue, request_id)
        assert sum(len(event["token_ids"]) for event in events) == count
        assert [event["finish_reason"] for event in events[-2:]] == [None, "cancelled"]


async def test_the_flag_and_a_message_of_a_plain_client_cancel(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.01)
    async with running_worker(redis_url, served, prefetch_depth=0):
        running = await async_put(queue, max_tokens=1000)
        await until_tokens(queue, running, 3)
        waiting = [await async_put(queue, priority=9) for _ in range(5)]
        for request_id in [running, *waiting]:
            await queue.redis.hset(queue.keys.request(request_id), "cancelled", "1")
            await queue.redis.publish(queue.keys.control, f"cancel:{request_id}")
        for request_id in [running, *waiting]:
            assert (await finished(queue, request_id))["finish_reason"] == "cancelled"


async def test_a_message_without_the_flag_cancels_nothing(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.005)):
        request_id = await async_put(queue, max_tokens=20)
        await until_tokens(queue, request_id, 3)
        await queue.redis.publish(queue.keys.control, f"cancel:{request_id}")
        await queue.redis.publish(queue.keys.control, b"\xff\xfe:\x00")
        assert (await finished(queue, request_id))["finish_reason"] == "length"


async def test_a_deadline_ends_a_running_request(redis_url: str, queue: AsyncRequestQueue) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)):
        request_id = await async_put(queue, max_tokens=2000, deadline_ms=60_000)
        await until_tokens(queue, request_id, 3)
        await queue.redis.zadd(queue.keys.deadlines, {request_id: 1})
        result = await finished(queue, request_id)
        assert result["finish_reason"] == "expired"
        assert 0 < len(result["token_ids"]) < 2000


async def test_a_cancel_that_fails_does_not_end_the_worker(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.005)):
        await queue.redis.set(queue.keys.leases, "of another type")
        await queue.redis.publish(queue.keys.control, "cancel:somebody")
        await asyncio.sleep(0.1)
        await queue.redis.delete(queue.keys.leases)
        request_id = await async_put(queue, max_tokens=3000)
        await until_tokens(queue, request_id, 3)
        await queue.cancel(request_id)
        assert (await finished(queue, request_id))["finish_reason"] == "cancelled"
