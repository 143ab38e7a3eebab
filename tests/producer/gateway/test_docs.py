"""The description of the API, which works without the outside world."""

from __future__ import annotations

import re

import httpx2
import pytest
from fastapi import FastAPI

from promptq.producer.gateway.app import create_app
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.protocol.request import Request


def test_the_page_needs_nothing_from_outside(http: httpx2.Client) -> None:
    """The page names every endpoint, with the fields of its body."""
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page.text)
    for path in http.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in page.text
    for field in ("messages", "temperature", "deadline_ms", "stream_options"):
        assert f"<code>{field}</code>" in page.text


async def test_each_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may read it as often as they like."""
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1/0"))
    made: list[FastAPI] = []
    describe = FastAPI.openapi
    monkeypatch.setattr(FastAPI, "openapi", lambda app: made.append(app) or describe(app))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=None
    ) as http:
        for path in ("/docs", "/openapi.json"):
            first, second = await http.get(path), await http.get(path)
            assert first.content == second.content
            assert (await http.head("/openapi.json")).status_code == 200
    assert made == [app, app]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_description_lists_the_fields_of_a_body(http: httpx2.Client, path: str) -> None:
    """The description has the fields of the endpoint and of a payload, and marks required ones."""
    document = http.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    elsewhere = {"prompt", "messages", "tools", "tool_choice", "chat_template_kwargs"}
    elsewhere |= {"embed", "tokenize"}
    everywhere = Request.model_fields.keys() - elsewhere - {"trace_context"}  # which is a header
    assert everywhere | {"n", "stream", "detach"} < set(body["properties"])
    assert body["required"] == (["messages"] if "chat" in path else ["prompt"])
    assert "$ref" not in str(body)


HEADERS = {"X-Priority", "X-Deadline-Ms", "X-Detach", "X-Wait-For-Worker", "Idempotency-Key"}
HEADERS |= {"X-Session-Id"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_description_lists_headers_and_errors(http: httpx2.Client, path: str) -> None:
    """Each error with the object that all of them are."""
    document = http.get("/openapi.json").json()
    operation = document["paths"][path]["post"]
    assert {it["name"] for it in operation["parameters"]} == HEADERS | {
        "Last-Event-ID",
        "X-Queue-Events",
    }
    assert {"400", "401", "403", "404", "408", "409", "413", "429", "500", "503"} < set(
        operation["responses"]
    )
    refused = http.post(path, json={}).json()["error"]
    assert set(refused) == set(document["components"]["schemas"]["ErrorObject"]["properties"])


def test_the_page_shows_bodies_of_each_kind_and_the_errors(http: httpx2.Client) -> None:
    """Forms and models as well as payloads, and no error that this gateway never answers with."""
    page = http.get("/docs").text
    for name in ("purpose", "input_file_id", "X-Priority", "/metrics", "429"):
        assert f"<code>{name}</code>" in page
    assert "<code>422</code>" not in page
    assert "`" not in page
    assert http.get(re.findall('rel="icon" href="(.*?)"', page)[0]).status_code == 200
