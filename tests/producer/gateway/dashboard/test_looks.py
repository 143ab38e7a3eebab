"""Each page on a phone and on a desktop, in light and in dark: kept as tests/artefacts/*.png."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import Page, expect

from promptq import AsyncClient
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.scripts import heartbeat
from tests.producer.gateway.dashboard.conftest import (
    DESKTOP,
    PHONE,
    Open,
    keep_screenshot,
    write_an_hour,
)
from tests.producer.playing import bury
from tests.support.model_free import running_worker, served_model_free

pytestmark = pytest.mark.asyncio(loop_scope="session")
LOOKS = [("phone", PHONE), ("desktop", DESKTOP)]
SCHEMES = ["light", "dark"]
CUT_OFF = """[...document.querySelectorAll(".scroll, nav, td")]
    .filter((it) => it.scrollWidth > it.clientWidth).map((it) => it.className || it.tagName)"""
"""Script that returns the parts of the page that are wider than their place."""


async def keep_both(page: Page, name: str, viewport: str, full_page: bool = True) -> None:
    for scheme in SCHEMES:
        await page.emulate_media(color_scheme=scheme)
        await keep_screenshot(page, f"{name}-{viewport}-{scheme}", full_page=full_page)


@pytest.mark.long
@pytest.mark.matrix(1)
@pytest.mark.parametrize(("viewport", "size"), LOOKS)
async def test_every_page_fits_its_window_and_is_kept_as_a_picture(
    redis_url: str,
    client: AsyncClient,
    connection: Any,
    open_page: Open,
    viewport: str,
    size: dict[str, int],
) -> None:
    bury(redis_url, "dead-1", "dead-2")
    served = served_model_free(max_num_seqs=8, step_seconds=0.02, num_blocks=512, block_size=16)
    await write_an_hour(connection)
    async with running_worker(redis_url, served) as worker:
        requests = [
            {
                "prompt": "Once upon a time there was a fox who lived by the sea",
                "max_tokens": 800 + 150 * (n % 5),
                "seed": n,
                "logprobs": 3,
                "priority": n % 3 * 5 - 5,
                "tenant": ["gold", "batch", None][n % 3],
            }
            for n in range(21)
        ]
        ids = await client.enqueue_many(requests)
        pages = [
            ("overview", "#/", "Waiting by priority"),
            ("worker", f"#/worker/{worker.worker_id}", "KV blocks, 512 in all"),
            ("requests", "#/requests?state=waiting", "waiting requests"),
            ("request", f"#/request/{ids[0]}", re.compile(r"\d tokens")),
            ("dead", "#/dead", "Purge all"),
            ("playground", "#/playground", "Nothing has run yet"),
        ]
        await until_running(client, 8)
        page = await open_page("", viewport=size)
        for name, place, text in pages:
            await page.evaluate("place => location.hash = place", place)
            await expect(page.get_by_text(text).first).to_be_visible()
            if name == "overview":
                await expect(page.locator(".chart path").first).to_be_visible()
            await keep_both(page, name, viewport)
            for width in (641, 800, 1001, size["width"]):
                await page.set_viewport_size({**size, "width": width})
                assert await page.evaluate(CUT_OFF) == [], (name, width)
        await page.evaluate("location.hash = '#/'")
        await page.get_by_role("button", name="Pause queue").click()
        await keep_both(page, "dialog", viewport, full_page=False)
        for request_id in ids:
            await client.cancel(request_id)


async def test_a_long_name_and_a_reason_fit_their_places(connection: Any, open_page: Open) -> None:
    name, why = f"promptq-chat-{'7d9f8c6b5d-' * 3}x2x4z-1-a1b2c3", "its server holds 12 requests"
    stats = WorkerStats(worker_id=name, state="no_server", holds_back=why)
    await AsyncRequestQueue(connection).run(heartbeat(stats, 60_000))
    for viewport, size in LOOKS:
        page = await open_page(viewport=size)
        await expect(page.get_by_role("cell", name=f"no_server {why}")).to_be_visible()
        assert await page.evaluate(CUT_OFF) == [], viewport
        await expect(page.get_by_role("button", name="Drain")).to_be_visible()


async def test_the_apis_description_fits_its_window(open_page: Open) -> None:
    for viewport, size in LOOKS:
        page = await open_page("docs", viewport=size)
        await page.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
        await keep_both(page, "docs", viewport, full_page=False)
        await page.get_by_role("link", name="dashboard").click()
        await page.get_by_role("link", name="API").click()
        await expect(page.get_by_text("/v1/batches").first).to_be_visible()


async def until_running(client: AsyncClient, num: int) -> None:
    while (await client.overview()).running < num:
        pass


@pytest.mark.parametrize(("viewport", "size"), LOOKS)
async def test_the_theme_switch_shows_its_label(
    open_page: Open, viewport: str, size: dict[str, int]
) -> None:
    page = await open_page(viewport=size)
    label = await page.locator("#theme span").bounding_box()
    assert label is not None
    assert label["width"] > 20, viewport


async def test_the_theme_is_chosen_and_kept(open_page: Open) -> None:
    page = await open_page(scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(background)
    switch = page.get_by_role("button", name="Theme")
    await switch.click()
    assert await page.evaluate(background) == light
    await switch.click()
    dark = await page.evaluate(background)
    assert dark != light
    await page.reload()
    assert await page.evaluate(background) == dark
    await switch.click()
    assert await page.evaluate(background) == light, "as the system has it"
