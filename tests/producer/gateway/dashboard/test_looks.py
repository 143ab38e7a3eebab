"""Each page on a phone and on a desktop, in light and in dark: kept as tests/artefacts/*.png."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
import redis.asyncio
from playwright.async_api import expect

from producer import AsyncClient
from shared.keys import Keys
from tests.helpers import running_worker, served_model_free
from tests.producer.gateway.dashboard.conftest import DESKTOP, PHONE, Open, keep_screenshot

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEYS = Keys("default")
LOOKS = [
    ("phone", PHONE, "dark"),
    ("phone", PHONE, "light"),
    ("desktop", DESKTOP, "dark"),
    ("desktop", DESKTOP, "light"),
]


async def write_an_hour(connection: Any) -> None:
    """Statistics as a busy hour would have left them."""
    now = int(time.time() * 1000) // 5000 * 5000
    pipeline = connection.pipeline(transaction=False)
    for nth in range(719, 0, -1):
        wave = 1 + math.sin(nth / 60) + 0.3 * math.sin(nth / 7)
        quiet = 300 < nth < 360
        fields = {
            "waiting": 0 if quiet else max(0, round(18 * wave)),
            "priorities": "{}",
            "delayed": 0,
            "active": 8,
            "running": 0 if quiet else 8,
            "workers": 1,
            "tokens_per_second": 0 if quiet else round(900 + 220 * wave, 1),
            "prompt_tokens_per_second": 300,
            "finished": 4,
            "ttft_p50_ms": "" if quiet else round(80 + 60 * wave),
            "ttft_p95_ms": "" if quiet else round(150 + 260 * wave),
            "queue_p50_ms": "" if quiet else round(20 + 50 * wave),
            "queue_p95_ms": "" if quiet else round(60 + 240 * wave),
        }
        pipeline.xadd(KEYS.statistics, fields, id=f"{now - nth * 5000}-0")
    await pipeline.execute()


async def test_every_page_looks_right(redis_url: str, client: AsyncClient, open_page: Open) -> None:
    served = served_model_free(max_num_seqs=8, step_seconds=0.02, block_size=4)
    async with (
        redis.asyncio.Redis.from_url(redis_url) as connection,
        running_worker(redis_url, served) as worker,
    ):
        await write_an_hour(connection)
        ids = [
            await client.enqueue(
                "Once upon a time there was a fox",
                max_tokens=4000,
                seed=n,
                logprobs=3,
                priority=(n % 3) * 5 - 5,
                tenant=["gold", "batch", None][n % 3],
            )
            for n in range(20)
        ]
        await anext(client.stream(ids[0]))
        await asyncio.sleep(1.5)
        for name, viewport, scheme in LOOKS:
            page = await open_page("#/", viewport=viewport, scheme=scheme)
            await expect(page.get_by_text("of 8 slots")).to_be_visible()
            await page.wait_for_timeout(300)
            await keep_screenshot(page, f"overview-{name}-{scheme}")
            for what, place, text in [
                ("worker", f"#/worker/{worker.worker_id}", "KV blocks, "),
                ("requests", "#/requests?state=active", "Searched"),
                ("request", f"#/request/{ids[0]}", "First token"),
                ("playground", "#/playground", "Answer"),
                ("dead", "#/dead", "No request"),
            ]:
                await page.goto(page.url.split("#")[0] + place)
                await expect(page.get_by_text(text).first).to_be_visible()
                await page.wait_for_timeout(300)
                await keep_screenshot(page, f"{what}-{name}-{scheme}")
        for request_id in ids:
            await client.cancel(request_id)
