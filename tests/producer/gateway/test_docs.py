"""The description of the API, which works without the outside world."""

from __future__ import annotations

import re

import httpx2
import pytest


def test_the_page_needs_nothing_from_outside(http: httpx2.Client) -> None:
    """It names every endpoint, with the fields of its body."""
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page.text)
    for path in http.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in page.text
    for field in ("messages", "temperature", "deadline_ms", "stream_options"):
        assert f"<code>{field}</code>" in page.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_description_lists_the_fields_of_a_body(http: httpx2.Client, path: str) -> None:
    """Those of the endpoint beside those of a payload; what is required is marked."""
    document = http.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"n", "stream", "top_k", "priority", "detach"} < set(body["properties"])
    assert body["required"] == (["messages"] if "chat" in path else ["prompt"])
    assert "$ref" not in str(body)
