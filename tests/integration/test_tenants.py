"""Tenants share a real worker, from the queue to the engine's slots."""

from __future__ import annotations

import redis.asyncio

from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.support.model_free import finished, running_worker, served_model_free
from tests.support.requests import new


async def test_a_flood_does_not_hold_up_another_tenant(redis_url: str) -> None:
    """A tenant that comes last with a few requests is served among the first."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        queue = AsyncRequestQueue(client)

        async def put(tenant: str | None, count: int) -> list[str]:
            fields = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "tenant": tenant}
            return await queue.enqueue([new(**fields) for _ in range(count)])

        flood = await put("flood", 300)
        few = await put("few", 5)
        plain = await put(None, 5)
        async with running_worker(redis_url, served_model_free(max_num_seqs=4)):
            for request_id in flood + few + plain:
                assert (await finished(queue, request_id))["finish_reason"] == "length"
        ended = {}
        for request_id in flood + few + plain:
            record = await queue.run(lookups.record(queue.keys, request_id))
            ended[request_id] = int(record["finished_at"])
        last = max(ended[request_id] for request_id in few + plain)
        assert sum(ended[request_id] < last for request_id in flood) < 60
        assert await client.hgetall(queue.keys.backlog) == {}
