"""A prompt is tried: the shipped model's tokens as they come, each with its probability."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from promptq import AsyncClient
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import build
from tests.producer.gateway.dashboard.conftest import DESKTOP, PHONE, Open, keep_screenshot
from tests.support.model_free import running_worker, served_model_free, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_tokens_come_with_their_probabilities(
    redis_url: str, client: AsyncClient, open_page: Open
) -> None:
    async with running_worker(redis_url, build(WorkerSettings(max_num_seqs=8))):
        page = await open_page("#/playground")
        await page.get_by_label("Prompt").fill("Once upon a time")
        await page.get_by_label("Max tokens").fill("40")
        await page.get_by_label("Seed").fill("7")
        await page.get_by_label("Likeliest shown").fill("3")
        await page.get_by_role("button", name="Run").click()
        await expect(page.locator(".outcome")).to_contain_text(re.compile("40 tokens.*length"))
        outcome = await page.locator(".outcome").evaluate("it => it.textContent")
        assert re.search(r"\d\u00a0tokens/s", outcome), "no break between number and unit"
        fields = {"max_tokens": 40, "seed": 7, "temperature": 0.8, "logprobs": 3}
        expected = await client.generate("Once upon a time", **fields)
        text = page.locator(".tokens .text")
        shown = await text.evaluate("it => it.textContent")
        assert shown == f"Once upon a time{expected.text}"
        tokens = page.locator(".token")
        assert expected.logprobs is not None
        chosen = expected.logprobs[2]
        await tokens.nth(2).hover()
        tip = page.locator(".tokens .tip")
        await expect(tip).to_contain_text(f"id {chosen.token_id}, rank {chosen.rank}")
        assert chosen.top is not None
        rows = tip.locator("tr")
        await expect(rows).to_have_count(
            len({chosen.token_id, *(it.token_id for it in chosen.top)})
        )
        assert chosen.top[0].token is not None
        await expect(rows.first).to_contain_text(chosen.top[0].token.strip() or "␣")
        await expect(rows.first).to_contain_text("%")
        await keep_screenshot(page, "playground-answer-desktop-light")
        await text.focus()
        await page.keyboard.press("Escape")
        await expect(tip).to_be_hidden()
        for _ in range(4):
            await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowLeft")
        await expect(tip).to_contain_text(f"id {chosen.token_id}, rank {chosen.rank}")
        await page.keyboard.press("Tab")
        await expect(tip).to_be_hidden()


async def test_a_token_that_is_tapped_shows_its_probability(
    redis_url: str, open_page: Open
) -> None:
    """For a finger does not hover."""
    async with running_worker(redis_url):
        page = await open_page("#/playground", viewport=PHONE, has_touch=True)
        await page.get_by_label("Prompt").fill("Once")
        await page.get_by_label("Max tokens").fill("9")
        await page.get_by_label("Seed").fill("5")
        await page.get_by_role("button", name="Run").tap()
        tokens, tip = page.locator(".token"), page.locator(".tokens .tip")
        await expect(tokens).to_have_count(9)
        for nth in (2, 6):
            await tokens.nth(nth).tap()
            letter = text_of(5, 9)[nth].replace(" ", "␣")
            await expect(tip.locator("caption")).to_contain_text(f"{letter} id ")
            await expect(tip).to_contain_text("100")


async def test_an_answer_is_stopped(redis_url: str, open_page: Open) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)):
        page = await open_page("#/playground", viewport=DESKTOP)
        await page.get_by_label("Prompt").fill("Once")
        await page.get_by_label("Max tokens").fill("3000")
        await page.get_by_label("Seed").fill("5")
        await page.get_by_label("Prompt").press("Tab")
        stop = page.get_by_role("button", name="Stop")
        await expect(stop).to_be_disabled()
        await page.get_by_role("button", name="Run").click()
        begins = re.compile(f"^Once{text_of(5, 10)}")
        await expect(page.locator(".tokens .text")).to_have_text(begins)
        await stop.click()
        await expect(page.locator(".outcome")).to_contain_text("ended with cancelled")
        await expect(stop).to_be_disabled()


async def test_why_nothing_comes_is_said(
    redis_url: str, client: AsyncClient, open_page: Open
) -> None:
    """In the playground and on the request's page, until a worker claims the request."""
    page = await open_page("#/playground")
    await page.get_by_label("Prompt").fill("Once")
    await page.get_by_label("Max tokens").fill("3000")
    await page.get_by_role("button", name="Run").click()
    outcome = page.locator(".outcome")
    await expect(outcome).to_contain_text("start one with promptq worker.")
    await client.pause()
    await expect(outcome).to_contain_text("The request waits: the queue is paused; promptq resume")
    other = await open_page("#/requests?state=waiting")
    await other.locator("td .id").click()
    because = other.locator(".problem")
    await expect(because).to_contain_text("The request waits: the queue is paused; promptq resume")
    await client.resume()
    await expect(because).to_contain_text("no worker is alive")
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)):
        await expect(outcome).to_contain_text("tokens/s")
        await expect(outcome).not_to_contain_text("waits")
        await expect(because).to_have_count(0)
        await page.get_by_role("button", name="Stop").click()
        await expect(outcome).to_contain_text("ended with cancelled")


async def test_what_is_wrong_with_a_request_is_said(open_page: Open) -> None:
    page = await open_page("#/playground", expected="400")
    await page.get_by_label("Prompt").fill("Once")
    await page.get_by_label("Stop at").fill("x")
    await page.get_by_label("Seed").evaluate("it => { it.type = 'text'; it.value = '-1' }")
    await page.get_by_role("button", name="Run").click()
    await expect(page.locator(".outcome")).to_contain_text("seed: ")
    await expect(page.get_by_role("button", name="Run")).to_be_enabled()
