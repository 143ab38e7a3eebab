"""A tenant with nothing running gets in although another holds every slot, or all KV memory."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis.asyncio

from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.support.model_free import finished, running_worker, served_model_free, text_of
from tests.support.requests import async_put, until_tokens
from tests.support.roles import as_role
from tests.support.waiting import async_until

NUM_TOKENS = 120
"""Of a long request."""


async def flood(
    queue: AsyncRequestQueue, num: int, tenant: str | None = "many", **fields: Any
) -> list[str]:
    """Long requests of one tenant. The seed of each is its place in the list."""
    fields = {"max_tokens": NUM_TOKENS} | fields
    return [await async_put(queue, seed=seed, tenant=tenant, **fields) for seed in range(num)]


async def assert_goes_first(queue: AsyncRequestQueue, before: list[str], **fields: Any) -> None:
    """A request of one token is answered before any of these ends."""
    request_id = await async_put(queue, seed=1, max_tokens=1, **fields)
    assert (await finished(queue, request_id))["text"] == text_of(1, 1)
    states = {await queue.state(each) for each in before}
    assert states <= {RequestState.WAITING, RequestState.ACTIVE}


async def assert_undisturbed(queue: AsyncRequestQueue, ids: list[str]) -> int:
    """Each has the tokens that it would have alone. Returns how often they made room."""
    results = [await finished(queue, request_id) for request_id in ids]
    assert [it["text"] for it in results] == [text_of(n, NUM_TOKENS) for n in range(len(ids))]
    return sum(it["stats"]["preemptions"] for it in results)


@pytest.mark.parametrize(("many", "few"), [("many", "few"), (None, "few")])
async def test_one_token_does_not_wait_for_the_end_of_another_tenants_long_requests(
    redis_url: str, queue: AsyncRequestQueue, many: str | None, few: str | None
) -> None:
    served = served_model_free(max_num_seqs=64, step_seconds=0.02, num_blocks=2048)
    ids = await flood(queue, 100, many)
    async with running_worker(redis_url, served) as worker:
        await async_until(lambda: worker.engine.stats.num_running == 64)
        await assert_goes_first(queue, ids, tenant=few)
        await assert_goes_first(queue, ids, tenant=few)
        assert 1 <= await assert_undisturbed(queue, ids) <= 2


async def test_it_does_not_wait_for_kv_memory_either(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=16, step_seconds=0.02, num_blocks=48)
    ids = await flood(queue, 20)
    async with running_worker(redis_url, served) as worker:
        await async_until(lambda: worker.engine.stats.num_used_blocks >= 40)
        await assert_goes_first(queue, ids, tenant="few", prompt="x" * 200)
        await assert_undisturbed(queue, ids)


async def test_it_does_not_wait_where_all_workers_are_full(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with AsyncExitStack() as stack:
        workers = []
        for _ in range(2):
            served = served_model_free(max_num_seqs=4, step_seconds=0.01)
            worker = running_worker(redis_url, served, drain_seconds=0)
            workers.append(await stack.enter_async_context(worker))
        ids = await flood(queue, 20, max_tokens=900)
        await async_until(lambda: all(it.engine.stats.num_running == 4 for it in workers))
        await assert_goes_first(queue, ids, tenant="few")


async def test_a_limit_of_running_requests_leaves_slots_free(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("operator", redis_url)) as client:
        await client.hset(queue.keys.config, "max_running:many", 2)
    async with running_worker(redis_url, served_model_free(step_seconds=0.02)):
        ids = await flood(queue, 5)
        for request_id in ids[:2]:
            await until_tokens(queue, request_id, 1)
        await assert_goes_first(queue, ids, tenant="few")
        states = [await queue.state(request_id) for request_id in ids]
        assert states == [RequestState.ACTIVE] * 2 + [RequestState.WAITING] * 3
        assert await assert_undisturbed(queue, ids) == 0
