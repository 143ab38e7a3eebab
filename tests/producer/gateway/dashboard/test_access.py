"""Who sees the dashboard, and what a browser lets its page do."""

from __future__ import annotations

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import expect
from structlog.testing import capture_logs

from producer import AsyncClient
from producer.api_keys import ApiKey
from producer.gateway.routes import dashboard, dashboard_actions
from tests.producer.gateway.dashboard.conftest import PHONE, Open, keep_screenshot
from tests.producer.gateway.living import LiveGateway

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
    open_to_anybody = {"/", "/dashboard/files/{name}"}
    routes = [*dashboard.router.routes, *dashboard_actions.router.routes]
    paths = {route.path for route in routes}
    assert paths - open_to_anybody == {path.split("?")[0] for _, path in DATA}


@pytest.mark.parametrize(("method", "path"), DATA)
async def test_only_an_administrator_sees_and_steers(
    gateway: LiveGateway, secrets: dict[str, str], method: str, path: str
) -> None:
    async with httpx2.AsyncClient(base_url=gateway.url) as http:
        body = BODY if method == "POST" else None
        assert (await http.request(method, path, json=body)).status_code == 401
        headers = {"Authorization": f"Bearer {secrets['tim']}"}
        answer = await http.request(method, path, json=body, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"


async def test_the_playground_takes_from_the_rates_of_its_key(
    gateway: LiveGateway, client: AsyncClient
) -> None:
    """And asks for no more than the key may, as any completion."""
    key = ApiKey(name="ann", tenant="gold", is_admin=True, requests_per_minute=1)
    secret, _ = await client.create_api_key(key)
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx2.AsyncClient(base_url=gateway.url, headers=headers) as http:

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
    await keep_screenshot(page, "key-desktop-light")
    await page.get_by_label("API key").fill(secrets["tim"])
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_text("needs one made with --admin")).to_be_visible()
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


async def test_files_come_with_a_strict_policy(gateway: LiveGateway) -> None:
    async with httpx2.AsyncClient(base_url=gateway.url) as http:
        answer = await http.get("/")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "<style" not in answer.text
        assert "style=" not in answer.text
        script = await http.get("/dashboard/files/app.js")
        assert script.headers["Content-Type"].startswith("text/javascript")
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
