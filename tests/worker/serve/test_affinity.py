"""A worker counts what affinity does for the requests that it claims."""

from __future__ import annotations

import pytest

from promptq import AsyncClient
from promptq.producer.admin.queue_stats import AffinityStats
from promptq.shared.protocol.claims import Room
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime import metrics
from tests.support.model_free import running_worker, served_model_free
from tests.support.requests import row
from tests.support.waiting import async_until
from tests.worker.serve.test_metrics import scrape, value

PROMPT = "a prompt of five blocks"  # 23 tokens


async def hold_elsewhere(queue: AsyncRequestQueue, client: AsyncClient, session: str) -> None:
    """Lets another worker serve the session's first request. The worker then lives and has room."""
    stats = WorkerStats(worker_id=queue.worker_id, max_num_seqs=4)
    await queue.run(scripts.heartbeat(stats, 60_000))
    await client.enqueue(PROMPT, session=session)
    [claim] = await queue.take_batch(Room(1, 10**6))
    await queue.publish([row(claim, 0, reason=FinishReason.STOP)])


async def test_held_missed_and_left_requests_and_their_cached_tokens_are_counted(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    await queue.redis.hset(queue.keys.config, "affinity_ms", 100)
    async with AsyncClient(redis_url) as client:
        await hold_elsewhere(queue, client, "theirs")
        async with running_worker(redis_url, served_model_free(block_size=4)) as worker:
            for session in ("own", "own", "theirs"):
                await client.generate(PROMPT, max_tokens=4, session=session)

            async def reported() -> AffinityStats | None:
                found = (await client.stats()).affinity
                return found if found and found.missed and found.cached_tokens else None

            affinity = await async_until(reported)
            scraped = await scrape(worker)
    assert affinity == AffinityStats(held=1, missed=1, left=1, cached_tokens=20)
    for result in ("held", "missed", "left"):
        assert value(scraped, metrics.AFFINITY_CLAIMS, result=result) == 1
    assert value(scraped, metrics.AFFINITY_CACHED) == 20


@pytest.mark.parametrize("setting", [None, "0", "no number"])
async def test_nothing_shows_while_affinity_is_off(
    redis_url: str, queue: AsyncRequestQueue, setting: str | None
) -> None:
    if setting is not None:
        await queue.redis.hset(queue.keys.config, "affinity_ms", setting)
    async with AsyncClient(redis_url) as client, running_worker(redis_url) as worker:
        for _ in range(2):
            await client.generate(PROMPT, max_tokens=4, session="s")
        scraped = await scrape(worker)
        assert (await client.stats()).affinity is None
        assert worker.meter.num_claimed == 2
    assert not [name for name in scraped if "affinity" in name]
