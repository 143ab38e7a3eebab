"""Each action asks first, does what it says, and is logged with who did it."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import redis.asyncio
from playwright.async_api import Page, expect
from structlog.testing import capture_logs

from promptq import AsyncClient
from promptq.shared.protocol.request import RequestState
from tests.producer.gateway.dashboard.conftest import Open, keep_screenshot
from tests.producer.gateway.living import LiveGateway
from tests.producer.playing import KEYS, bury
from tests.support.model_free import running_worker, served_model_free
from tests.support.roles import as_role

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def confirm(page: Page, button: str, action: str, said: str) -> None:
    """Press a button, agree, and read what came of it."""
    await page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name=action).click()
    await expect(page.locator("#toasts")).to_contain_text(said)


async def test_nothing_is_done_unless_it_is_confirmed(client: AsyncClient, open_page: Open) -> None:
    page = await open_page()
    with capture_logs() as logs:
        await page.get_by_role("button", name="Pause queue").click()
        await page.get_by_role("button", name="Leave it").click()
        await page.get_by_role("button", name="Pause queue").click()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
    assert not [it for it in logs if "action" in it]
    assert not (await client.stats()).paused


async def test_pause_and_resume(client: AsyncClient, open_page: Open) -> None:
    page = await open_page()
    with capture_logs() as logs:
        await confirm(page, "Pause queue", "Pause", "The queue is paused")
        assert (await client.stats()).paused
        await expect(page.locator(".title .badge")).to_have_text("paused")
        await confirm(page, "Resume queue", "Resume", "hands out requests again")
    assert not (await client.stats()).paused
    mine = [it for it in logs if "action" in it]
    assert [it["action"] for it in mine] == ["pause", "resume"]
    assert {it["by"] for it in mine} == {"local"}
    assert mine[0]["address"] == "127.0.0.1"


async def test_cancel_what_waits_and_what_runs(
    redis_url: str, client: AsyncClient, open_page: Open
) -> None:
    waiting = await client.enqueue("Once", max_tokens=2000)
    page = await open_page(f"#/request/{waiting}")
    with capture_logs() as logs:
        await confirm(page, "Cancel request", "Cancel the request", "It is cancelled")
        assert await client.state(waiting) is RequestState.CANCELLED
        await expect(page.get_by_role("button", name="Cancel request")).to_have_count(0)
        async with running_worker(redis_url, served_model_free(step_seconds=0.01)):
            running = await client.enqueue("Once", max_tokens=2000)
            await anext(client.stream(running))
            await page.evaluate("id => location.hash = `#/request/${id}`", running)
            await expect(page.get_by_role("heading", name=running)).to_be_visible()
            await confirm(page, "Cancel request", "Cancel the request", "Its worker ends it now")
            await expect(page.locator(".timeline")).to_contain_text("Finished cancelled")
            assert await client.state(running) is RequestState.CANCELLED
    mine = [it for it in logs if it.get("action") == "cancel"]
    assert [it["request_id"] for it in mine] == [waiting, running]
    assert [it["status"] for it in mine] == ["cancelled", "flagged"]


async def test_change_the_priority_of_what_waits(
    client: AsyncClient, connection: Any, open_page: Open
) -> None:
    for name in ("a", "b"):
        await client.enqueue("Once", request_id=name)
    page = await open_page("#/request/b")
    await page.get_by_role("button", name="Change priority").click()
    field = page.get_by_label("Priority, -1000 to 1000")
    await expect(field).to_have_value("0")
    await keep_screenshot(page, "priority-desktop-light", full_page=False)
    await field.fill("-2000")
    await page.get_by_role("button", name="Change it").click()
    await expect(field).to_be_visible()  # the browser holds it to the range
    await field.fill("-7")
    with capture_logs() as logs:
        await page.get_by_role("button", name="Change it").click()
        await expect(page.locator("#toasts")).to_contain_text("It has moved")
    assert await connection.zrange(KEYS.pending, 0, -1) == [b"b", b"a"]
    await expect(page.locator(".facts")).to_contain_text("Priority-7")
    mine = [it for it in logs if "action" in it]
    assert [(it["action"], it["request_id"], it["priority"]) for it in mine] == [
        ("reprioritise", "b", -7)
    ]


async def test_drain_a_worker(redis_url: str, connection: Any, open_page: Open) -> None:
    async with running_worker(redis_url) as worker, connection.pubsub() as channel:
        await channel.subscribe(KEYS.control)
        page = await open_page()
        with capture_logs() as logs:
            await confirm(page, "Drain", "Drain it", "finishes its requests and exits")
        async for message in channel.listen():
            if message["data"] == f"drain:{worker.worker_id}".encode():
                break
        assert [it["worker_id"] for it in logs if it.get("action") == "drain"] == [worker.worker_id]


async def test_drain_of_a_worker_without_a_name_drains_nobody(
    client: AsyncClient, connection: Any, gateway: LiveGateway
) -> None:
    async with connection.pubsub() as channel:
        await channel.subscribe(KEYS.control)
        async with httpx2.AsyncClient(base_url=gateway.url, timeout=None) as http:
            answer = await http.post("/dashboard/api/drain", json={"id": ""})
            assert answer.status_code == 404
        assert await client.drain("") == []
        await client.drain("last")
        async for message in channel.listen():
            assert message["data"] != b"drain", "which is for all"
            if message["data"] == b"drain:last":
                break


async def test_requeue_and_purge_dead_letters(
    redis_url: str, client: AsyncClient, connection: Any, open_page: Open
) -> None:
    bury(redis_url, "one", "two", "three", "four")
    page = await open_page("#/dead")
    letters = page.locator("article")
    await expect(letters).to_have_count(4)
    shown = await letters.locator("h2").all_inner_texts()
    await expect(letters.first).to_contain_text("after 2 crashes in 2 attempts")
    await letters.first.get_by_text("Attempts and payload").click()
    await expect(letters.first).to_contain_text("Attempt 2 on victim")
    await expect(letters.first).to_contain_text("[bold]boom[/]")
    with capture_logs() as logs:
        await confirm(page, "Requeue", "Requeue", "It runs again as")
        await expect(letters).to_have_count(3)
        assert (await client.stats()).waiting == 1
        await confirm(page, "Purge", "Purge", "1 purged")
        await expect(letters).to_have_count(2)
        await confirm(page, "Requeue all", "Requeue", "2 run again")
        await expect(page.get_by_text("There are no dead letters")).to_be_visible()
        assert (await client.stats()).waiting == 3
        async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as admin:
            await admin.flushall()
        bury(redis_url, "five")
        await page.reload()
        await confirm(page, "Purge all", "Purge", "1 purged")
    assert await client.dead_ids() == []
    done = [(it["action"], it.get("request_id") or it["request_ids"]) for it in logs if "by" in it]
    first, second, third, fourth = shown
    assert done[:2] == [("requeue", first), ("purge", [second])]
    assert sorted(done[2:4]) == sorted([("requeue", third), ("requeue", fourth)])
    assert done[4] == ("purge", ["five"])


async def test_an_action_that_comes_too_late_says_so(client: AsyncClient, open_page: Open) -> None:
    await client.enqueue("Once", request_id="a")
    page = await open_page("#/request/a", expected="404")
    await page.get_by_role("button", name="Change priority").click()
    await client.cancel("a")
    await page.get_by_role("button", name="Change it").click()
    await expect(page.locator("#toasts")).to_contain_text("Nothing changed: it has ended")


async def test_other_web_sites_may_do_nothing(client: AsyncClient, gateway: LiveGateway) -> None:
    """Without keys a browser's user may do everything, and so could each page that they visit."""
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=None) as http:
        for site in ("cross-site", "same-site"):
            answer = await http.post("/dashboard/api/pause", headers={"Sec-Fetch-Site": site})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "cross_site"
        assert not (await client.stats()).paused
        answer = await http.post("/dashboard/api/pause", headers={"Sec-Fetch-Site": "same-origin"})
        assert answer.json() == {"paused": True}
