"""A real gateway, and one headless Chromium for all tests, both in the session's event loop."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from promptq import AsyncClient
from promptq.shared.protocol.worker_stats import SAMPLE_MS
from tests.producer.gateway.living import LiveGateway, serving
from tests.producer.playing import KEYS
from tests.support.paths import ROOT

ARTEFACTS = ROOT / "tests" / "artefacts"
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
FEATURES = [
    # Each window would load two pages of the browser's address bar.
    *("WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),
    # Playwright disables these, and the last list is the one that counts.
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades"),
    *("LensOverlay", "MediaRouter", "OptimizationHints", "PaintHolding"),
    *("ThirdPartyStoragePartitioning", "NetworkTimeServiceQuerying", "AimEnabled"),
]
ARGS = [
    *("--headless", "--no-sandbox", "--disable-background-networking"),
    f"--disable-features={','.join(FEATURES)}",
]

expect.set_options(timeout=20_000)  # the machine may be busy; nothing waits for it on purpose


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed; the dashboard is not tested in a browser")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(redis_url: str) -> AsyncIterator[LiveGateway]:
    """A gateway on the empty embedded server."""
    async with serving(redis_url) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def connection(redis_url: str) -> AsyncIterator[Any]:
    """The server, for what no client does."""
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        yield connection


Open = Callable[..., Any]
"""Opens a page: `await open("#/requests", viewport=PHONE, scheme="dark")`."""


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser: Browser, gateway: LiveGateway) -> AsyncIterator[Open]:
    """A page may load files from the gateway alone, and none may fail or be refused."""
    troubles: list[str] = []
    async with AsyncExitStack() as stack:

        async def open_page(
            place: str = "#/",
            *,
            viewport: Any = DESKTOP,
            scheme: Any = "light",
            expected: str = "",
            url: str = gateway.url,
            has_touch: bool = False,
        ) -> Page:
            """`expected`: a pattern of the console errors that the test provokes."""
            context = await browser.new_context(
                viewport=viewport, color_scheme=scheme, has_touch=has_touch
            )
            stack.push_async_callback(context.close)
            page = await context.new_page()

            def heard(message: Any) -> None:
                if message.type == "error" and not (expected and re.search(expected, message.text)):
                    troubles.append(message.text)

            page.on("console", heard)
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on(
                "request",
                lambda it: None if it.url.startswith(url) else troubles.append(it.url),
            )
            await page.goto(f"{url}/{place}")
            return page

        yield open_page
    assert troubles == []


async def keep_screenshot(page: Page, name: str, *, full_page: bool = True) -> None:
    """Keep what a page looks like, as tests/artefacts/NAME.png; it must not be wider than its
    window."""
    ARTEFACTS.mkdir(exist_ok=True)
    await page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=full_page)
    width = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0, f"{name} scrolls sideways by {width} pixels"


async def write_an_hour(connection: Any) -> None:
    """Statistics as a busy hour with a quiet while would have left them."""
    latest = int(time.time() * 1000) // SAMPLE_MS * SAMPLE_MS - SAMPLE_MS
    pipeline = connection.pipeline(transaction=False)
    for nth in range(719, -1, -1):
        wave = max(0.0, 1.2 + math.sin(nth / 60) + 0.3 * math.sin(nth / 7))
        fields: dict[str, Any] = {"waiting": 0, "running": 0, "tokens_per_second": 0}
        fields |= {f"{kind}_p{share}_ms": "" for kind in ("ttft", "queue") for share in (50, 95)}
        if not 300 < nth < 330:
            fields = {"waiting": round(9 * wave), "running": 8}
            fields |= {"tokens_per_second": round(230 + 40 * wave, 1)}
            fields |= {"ttft_p50_ms": round(40 + 30 * wave), "ttft_p95_ms": round(70 + 130 * wave)}
            fields |= {"queue_p50_ms": round(15 + 25 * wave), "queue_p95_ms": 30 + 120 * wave}
        pipeline.xadd(KEYS.statistics, fields, id=f"{latest - nth * SAMPLE_MS}-0")
    await pipeline.execute()
