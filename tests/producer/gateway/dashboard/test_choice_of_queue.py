"""The dashboard of a gateway with several queues."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from promptq import AsyncClient
from tests.producer.gateway.dashboard.conftest import PHONE, Open, keep_screenshot
from tests.support.model_free import running_worker, served_model_free

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_tab_shows_the_queue_that_is_chosen(redis_url: str, open_page: Open) -> None:
    owl, wren = (served_model_free(name=name) for name in ("owl", "wren"))
    async with (
        running_worker(redis_url, owl),
        running_worker(redis_url, wren, queue="b"),
        AsyncClient(redis_url, "b") as client,
    ):
        request_id = await client.enqueue("Hi", max_tokens=5)
        assert (await client.result(request_id)).text
        page = await open_page("#/")
        choice = page.get_by_role("combobox", name="Queue")
        await expect(choice).to_have_value("default")
        await expect(choice.locator("option")).to_have_text(["default (owl)", "b (wren)"])
        await expect(page.get_by_text("owl", exact=True).first).to_be_visible()
        await choice.select_option("b")
        await expect(page.get_by_text("wren", exact=True).first).to_be_visible()
        await keep_screenshot(page, "two-queues-desktop")
        await page.get_by_role("link", name="Requests").click()
        await page.evaluate("id => location.hash = `#/request/${id}`", request_id)
        await expect(page.get_by_text("5 tokens").first).to_be_visible()
        await choice.select_option("default")  # which has no such request
        await expect(page).to_have_url(f"{page.url.partition('#')[0]}#/")
        phone = await open_page("#/", viewport=PHONE)
        await expect(phone.get_by_role("combobox", name="Queue")).to_have_value("default")
        await keep_screenshot(phone, "two-queues-phone")
    await choice.select_option("b")
    await expect(page.get_by_text("start one with promptq worker --queue b.")).to_be_visible()
