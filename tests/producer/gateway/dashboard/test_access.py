"""Access to the dashboard, and the limits that the browser puts on its page."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import expect
from structlog.testing import capture_logs

from promptq import AsyncClient
from promptq.producer.admin.api_keys import ApiKey, hash_of
from promptq.producer.gateway.dashboard import actions, page_files, page_stream, pages
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.gateway.dashboard.conftest import PHONE, Open, keep_screenshot
from tests.producer.gateway.living import LiveGateway, bearer, serving
from tests.support.servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def secrets(client: AsyncClient) -> dict[str, str]:
    """The key of an administrator and that of a tenant."""
    made = {}
    for name, is_admin in (("ann", True), ("tim", False)):
        key = ApiKey(name=name, tenant=None if is_admin else "gold", is_admin=is_admin)
        made[name], _ = await client.create_api_key(key)
    return made


DATA = [
    ("GET", "/dashboard/api/caller"),
    ("GET", "/dashboard/api/live/overview"),
    ("GET", "/dashboard/api/live/worker?id=w"),
    ("GET", "/dashboard/api/live/request?id=r"),
    ("GET", "/dashboard/api/live/requests?state=waiting"),
    ("GET", "/dashboard/api/live/dead"),
    ("GET", "/dashboard/api/requests"),
    ("GET", "/dashboard/api/dead"),
    ("POST", "/dashboard/api/cancel"),
    ("POST", "/dashboard/api/reprioritise"),
    ("POST", "/dashboard/api/pause"),
    ("POST", "/dashboard/api/resume"),
    ("POST", "/dashboard/api/drain"),
    ("POST", "/dashboard/api/dead/requeue"),
    ("POST", "/dashboard/api/dead/purge"),
    ("POST", "/dashboard/api/play"),
]
BODY = {"id": "r", "priority": 1, "all": True, "prompt": "x"}


async def test_the_list_of_data_is_complete() -> None:
    open_to_anybody = {"/", "/favicon.ico", "/dashboard/files/{name:path}"}
    routers = (page_files.router, pages.router, actions.router)
    routes = [route for router in routers for route in router.routes]
    paths = {route.path for route in routes}
    assert paths - open_to_anybody == {path.split("?")[0] for _, path in DATA}


@pytest.mark.parametrize(("method", "path"), DATA)
async def test_only_an_administrator_sees_and_steers(
    gateway: LiveGateway, secrets: dict[str, str], method: str, path: str
) -> None:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=None) as http:
        body = BODY if method == "POST" else None
        assert (await http.request(method, path, json=body)).status_code == 401
        headers = bearer(secrets["tim"])
        answer = await http.request(method, path, json=body, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"


STREAMS_ASK = {"id": "r", "state": "waiting"}
STREAMS = [path.partition("?")[0] for _, path in DATA if "/live/" in path]


async def read_to_its_end(http: httpx2.AsyncClient, path: str, begun: asyncio.Event) -> None:
    async with http.stream("GET", path, params=STREAMS_ASK, timeout=30) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            begun.set()


@pytest.mark.parametrize("what", ["revoked", "no administrator's", "the first"])
async def test_a_stream_ends_when_its_reader_is_let_in_no_more(
    gateway: LiveGateway,
    client: AsyncClient,
    connection: Any,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """Its key is revoked or changed, or there was none and now there is one."""
    monkeypatch.setattr(page_stream, "CHECK_SECONDS", 0.05)
    await client.enqueue("Once", request_id="r")
    headers = {}
    if what != "the first":
        await client.create_api_key(ApiKey(name="other"))
        secret, key = await client.create_api_key(ApiKey(name="ann", is_admin=True))
        headers = bearer(secret)
    begun = [asyncio.Event() for _ in STREAMS]
    assert len(STREAMS) == 5
    async with httpx2.AsyncClient(base_url=gateway.url, headers=headers, timeout=None) as http:
        reading = [
            asyncio.create_task(read_to_its_end(http, *it))
            for it in zip(STREAMS, begun, strict=True)
        ]
        for it in begun:
            await it.wait()
        done, _ = await asyncio.wait(reading, timeout=0.3)
        assert not done, "they go on for who may read"
        if what == "revoked":
            await client.revoke_api_key("ann")
        elif what == "the first":
            await client.create_api_key(ApiKey(name="ann"))
        else:
            plain = key.model_copy(update={"is_admin": False}).model_dump_json()
            await connection.hset(Keys().api_keys, hash_of(secret), plain)
        await asyncio.gather(*reading)
        expected = 403 if what == "no administrator's" else 401
        for path in STREAMS:
            answer = await http.get(path, params=STREAMS_ASK)
            assert answer.status_code == expected


async def test_a_stream_goes_on_while_keys_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis is away: the stream says so, and goes on with what there is."""
    monkeypatch.setattr(page_stream, "CHECK_SECONDS", 0.05)
    server = EmbeddedServer(free_port())
    url = server.url
    path = "/dashboard/api/live/overview"
    try:
        async with (
            serving(url) as gateway,
            httpx2.AsyncClient(base_url=gateway.url, timeout=30) as http,
            http.stream("GET", path) as answer,
        ):
            lines = answer.aiter_lines()

            async def hear(event: str) -> None:
                async for line in lines:
                    if line == f"event: {event}":
                        return
                pytest.fail(f"it ended before {event}")

            await hear("overview")
            server.stop()
            for _ in range(3):
                await hear("unreachable")
            server = EmbeddedServer(server.port, password=server.password)
            await hear("overview")
            async with AsyncClient(url) as client:
                await client.create_api_key(ApiKey(name="ann"))
            async for _ in lines:
                pass  # until its end, for there is a key now
    finally:
        server.stop()


async def test_the_playground_takes_from_the_rates_of_its_key(
    gateway: LiveGateway, client: AsyncClient
) -> None:
    """And asks for no more than the key may, as any completion."""
    key = ApiKey(name="ann", tenant="gold", is_admin=True, requests_per_minute=1)
    secret, _ = await client.create_api_key(key)
    headers = bearer(secret)
    async with httpx2.AsyncClient(base_url=gateway.url, headers=headers, timeout=None) as http:

        async def play(**fields: object) -> httpx2.Response:
            return await http.post("/dashboard/api/play", json={"prompt": "Hi", **fields})

        assert (await play(priority=-1)).status_code == 403
        assert (await play(tenant="silver")).status_code == 403
        played = await play()
        assert played.status_code == 200
        assert (await client.timeline(played.json()["id"])).tenant == "gold"
        assert (await play()).json()["error"]["code"] == "rate_limit_exceeded"


async def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab(
    client: AsyncClient, secrets: dict[str, str], open_page: Open
) -> None:
    page = await open_page(expected="40")
    await expect(page.get_by_role("heading", name="A key, please")).to_be_visible()
    await expect(page.locator(".reason")).to_have_count(0)
    await keep_screenshot(page, "key-desktop-light")
    await page.get_by_label("API key").fill(secrets["tim"])
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_text("needs a key made with --admin")).to_be_visible()
    await page.get_by_label("API key").fill(secrets["ann"])
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await expect(page.get_by_text("No worker is alive")).to_be_visible()
    await page.get_by_role("button", name="Pause queue").click()
    with capture_logs() as logs:
        await page.get_by_role("button", name="Pause", exact=True).click()
        await expect(page.locator("#toasts")).to_contain_text("paused")
    assert [it["by"] for it in logs if it.get("action") == "pause"] == ["ann"]
    assert (await client.stats()).paused
    assert await page.evaluate("JSON.stringify([localStorage, document.cookie])") == '[{},""]'
    await page.reload()
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await page.set_viewport_size(PHONE)
    forget = page.get_by_role("button", name="Forget key")
    await keep_screenshot(page, "key-phone-light")
    box, first_row = await forget.bounding_box(), await page.locator(".brand").bounding_box()
    assert box is not None
    assert first_row is not None
    assert box["y"] < first_row["y"] + first_row["height"], "beside the name, not below it"
    await forget.click()
    await expect(page.get_by_role("heading", name="A key, please")).to_be_visible()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("place", ["#/", "#/worker/w", "#/request/r"])
async def test_an_open_page_asks_for_a_key_when_its_own_is_revoked(
    client: AsyncClient, secrets: dict[str, str], open_page: Open, place: str
) -> None:
    await client.enqueue("Once", request_id="r")
    page = await open_page(place, expected="401")
    await page.get_by_label("API key").fill(secrets["ann"])
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_label("API key")).to_be_hidden()
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await client.revoke_api_key("ann")
    await expect(page.get_by_role("heading", name="A key, please")).to_be_visible()
    await expect(page.get_by_text("unknown or was revoked")).to_be_visible()
    await expect(page.locator("#banner")).to_be_hidden()


async def test_files_come_with_a_strict_policy(gateway: LiveGateway) -> None:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=None) as http:
        answer = await http.get("/")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "<style" not in answer.text
        assert "style=" not in answer.text
        script = await http.get("/dashboard/files/app.js")
        assert script.headers["Content-Type"].startswith("text/javascript")
        icon = await http.get("/favicon.ico")
        assert icon.headers["content-type"].startswith("image/svg+xml")
        assert (await http.get("/dashboard/files/nothing.js")).status_code == 404
        assert (await http.get("/dashboard/files/..%2f__init__.py")).status_code == 404


async def test_a_browser_holds_to_the_policy(open_page: Open) -> None:
    """Even a mistake in a script could neither fetch from elsewhere nor make text into HTML."""
    page = await open_page(expected="Content Security Policy|TrustedHTML")
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    elsewhere = "fetch('https://example.org').then(() => 'fetched', () => 'refused')"
    assert await page.evaluate(elsewhere) == "refused"
    into_html = "() => { try { document.body.innerHTML = '<b>' } catch { return 'refused' } }"
    assert await page.evaluate(into_html) == "refused"
