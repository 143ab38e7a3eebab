"""Which request a worker claims and runs next, and how much it claims."""

from __future__ import annotations

import asyncio

from promptq.shared.protocol.request import RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.leases.lease import LeaseState
from promptq.worker.serve.worker import Worker
from tests.support.model_free import finished, running_worker, served_model_free, text_of
from tests.support.requests import async_put, until_tokens
from tests.support.waiting import async_until


def is_prepared(worker: Worker, request_id: str) -> bool:
    lease = worker.leases.by_request(request_id)
    return lease is not None and lease.state is not LeaseState.PREPARING


async def test_more_urgent_requests_run_first(redis_url: str, queue: AsyncRequestQueue) -> None:
    ended_at = {}
    ids = {}
    for name, priority in [("late", 5), ("middle", 0), ("soon", -5)]:
        ids[name] = await async_put(queue, priority=priority, max_tokens=5)
    async with running_worker(redis_url, served_model_free(max_num_seqs=1, step_seconds=0.005)):
        for name, request_id in ids.items():
            await finished(queue, request_id)
            record = await queue.run(lookups.record(queue.keys, request_id))
            ended_at[name] = int(record["finished_at"])
    assert ended_at["soon"] < ended_at["middle"] < ended_at["late"]


async def test_what_is_prefetched_goes_out_by_priority_even_if_it_came_later(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.01)
    async with running_worker(redis_url, served, prefetch_depth=8) as worker:
        first = await async_put(queue, max_tokens=2000)
        await until_tokens(queue, first, 1)
        others = [await async_put(queue, priority=1, max_tokens=2) for _ in range(5)]
        await async_until(lambda: len(worker.leases.ready) >= 3)
        urgent = await async_put(queue, priority=0, max_tokens=2)
        await async_until(lambda: is_prepared(worker, urgent))
        await queue.cancel(first)
        result = await finished(queue, urgent)
        # One of the others may already lie in the engine, behind the slot; no more than that.
        states = [await queue.state(request_id) for request_id in others]
        assert states.count(RequestState.COMPLETED) <= 1
        assert result["finish_reason"] == "length"
        for request_id in others:
            await finished(queue, request_id)


async def test_an_urgent_request_preempts_and_both_end_right(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.005)
    async with running_worker(redis_url, served) as worker:
        lazy = await async_put(queue, seed=1, priority=5, max_tokens=60)
        await until_tokens(queue, lazy, 5)
        urgent = await async_put(queue, seed=2, priority=-5, max_tokens=5)
        assert (await finished(queue, urgent))["text"] == text_of(2, 5)
        assert await queue.state(lazy) is RequestState.ACTIVE
        result = await finished(queue, lazy)
        assert result["text"] == text_of(1, 60)
        assert result["stats"]["preemptions"] == 1
        assert worker.engine.stats.num_preemptions == 1


async def test_urgent_requests_are_claimed_no_further_than_they_can_preempt(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """The backlog stays in the queue, where other workers find it."""
    served = served_model_free(max_num_seqs=4, step_seconds=0.02, num_blocks=512)
    async with running_worker(redis_url, served, drain_seconds=0, prefetch_depth=1) as worker:
        for request_id in [await async_put(queue, priority=9, max_tokens=2000) for _ in range(4)]:
            await until_tokens(queue, request_id, 1)
        most = 0
        for _ in range(100):
            await async_put(queue, priority=0, max_tokens=500)
            most = max(most, len(worker.leases))
        assert 4 < most <= 4 + 1 + 1 + 4, "slots, one ahead in the engine, prefetched, preempting"
        assert await queue.count() > 80


async def test_an_urgent_request_gets_into_a_full_engine(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.005)
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        lazy = [await async_put(queue, priority=5, max_tokens=2000) for _ in range(3)]
        await async_until(lambda: worker.leases.num_running >= 2)
        urgent = await async_put(queue, priority=-5, seed=3, max_tokens=5)
        assert (await finished(queue, urgent))["text"] == text_of(3, 5)
        assert [await queue.state(it) for it in lazy[:2]] == [RequestState.ACTIVE] * 2


async def test_claims_no_more_than_its_kv_memory_is_expected_to_hold(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(num_blocks=64, step_seconds=0.005)  # 1,024 tokens
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        for n in range(12):
            await async_put(queue, prompt=f"{n:02}" * 100, max_tokens=200)
        for _ in range(100):
            assert worker.leases.kv_need <= 1024
            await asyncio.sleep(0.005)
        assert 0 < len(worker.leases) <= 2 + 2, "200 of prompt and up to 200 of output each"


async def test_counts_a_shared_prefix_once(redis_url: str, queue: AsyncRequestQueue) -> None:
    served = served_model_free(num_blocks=64, step_seconds=0.05)  # 1,024 tokens
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        requests = [await async_put(queue, prompt="x" * 400, max_tokens=24) for _ in range(12)]
        while worker.engine.stats.num_running < 8:  # 2 would fit with prefixes of their own
            assert not worker.engine.stats.num_processed
            await asyncio.sleep(0.005)
        for request_id in requests:
            assert (await finished(queue, request_id))["finish_reason"] == "length"
        assert not worker.engine.stats.num_preemptions
