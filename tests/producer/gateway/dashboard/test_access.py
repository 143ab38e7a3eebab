"""Who sees the dashboard, and what a browser lets its page do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI, Request
from playwright.async_api import expect

from producer.gateway.access import Caller, caller_of
from producer.gateway.app import create_app
from producer.gateway.errors import ApiError
from producer.gateway.routes import dashboard, dashboard_actions
from tests.producer.gateway import living
from tests.producer.gateway.dashboard.conftest import Open
from tests.producer.gateway.living import LiveGateway, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALLERS = {
    "Bearer of-an-admin": Caller(name="ann"),
    "Bearer of-a-tenant": replace(Caller(name="tim"), tenant="gold", is_admin=False),
}


@pytest_asyncio.fixture(loop_scope="session")
async def keyed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveGateway]:
    """A gateway with a key for an administrator and one for a tenant."""

    async def keyed_caller(request: Request) -> Caller:
        try:
            return CALLERS[request.headers.get("Authorization", "")]
        except KeyError:
            raise ApiError(401, "this key is unknown") from None

    def with_keys(*args: Any) -> FastAPI:
        app = create_app(*args)
        app.dependency_overrides[caller_of] = keyed_caller
        return app

    monkeypatch.setattr(living, "create_app", with_keys)
    async with serving(redis_url) as gateway:
        yield gateway


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
    paths = {route.path for route in routes}  # type: ignore[attr-defined]
    assert paths - open_to_anybody == {path.split("?")[0] for _, path in DATA}


@pytest.mark.parametrize(("method", "path"), DATA)
async def test_only_an_administrator_sees_and_steers(
    keyed: LiveGateway, method: str, path: str
) -> None:
    async with httpx2.AsyncClient(base_url=keyed.url) as http:
        body = BODY if method == "POST" else None
        assert (await http.request(method, path, json=body)).status_code == 401
        headers = {"Authorization": "Bearer of-a-tenant"}
        answer = await http.request(method, path, json=body, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"


async def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab(
    keyed: LiveGateway, open_page: Open
) -> None:
    page = await open_page(url=keyed.url, expected="40")
    await expect(page.get_by_role("heading", name="A key, please")).to_be_visible()
    await page.get_by_label("API key").fill("of-a-tenant")
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_text("may not see or steer the queue")).to_be_visible()
    await page.get_by_label("API key").fill("of-an-admin")
    await page.get_by_role("button", name="Enter").click()
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await expect(page.get_by_text("No worker is alive")).to_be_visible()
    assert await page.evaluate("JSON.stringify([localStorage, document.cookie])") == '[{},""]'
    await page.reload()
    await expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    await page.get_by_role("button", name="Forget key").click()
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
