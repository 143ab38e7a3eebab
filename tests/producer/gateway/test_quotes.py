"""Quotes for the bodies of each API."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from promptq.producer.calls import call_body

TEXT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "top_logprobs": 2, "logprobs": True},
    "/v1/completions": {"prompt": ["Once", "Twice"], "echo": True},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 5},
    "/v1/messages": {"messages": TEXT, "max_tokens": 5, "system": "Be brief.", "tools": TOOLS},
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_each_body_gets_its_quote(http: httpx2.Client, endpoint: str) -> None:
    def quote_of(body: dict[str, Any]) -> httpx2.Response:
        return http.post("/v1/quote", params={"endpoint": endpoint}, json=body)

    quote = quote_of(BODIES[endpoint]).json()
    num_before = len(BODIES[endpoint].get("prompt", [""])) - 1
    assert (quote["object"], quote["in_front"]) == ("quote", num_before)
    large = {**BODIES[endpoint], "metadata": {"large": "x" * 70_000}}
    assert quote_of(large).json() == quote, "another process reads it"
    assert quote_of({**BODIES[endpoint], "unknown": 1}).json()["error"]["param"] == "unknown"


def test_a_response_that_continues_another_gets_a_quote(http: httpx2.Client) -> None:
    stored = {"input": "Hi", "background": True}
    first = http.post("/v1/responses", json=stored).json()["id"]
    body = {"input": "Go on.", "previous_response_id": first}
    answer = http.post("/v1/quote", params={"endpoint": "/v1/responses"}, json=body)
    assert answer.json()["error"]["code"] == "previous_response_not_over"


def test_a_body_is_parsed_once(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = call_body.from_json

    def noting(content: bytes, **options: Any) -> Any:
        parsed.append(content)
        return parse(content, **options)

    monkeypatch.setattr(call_body, "from_json", noting)
    for body in ({"messages": TEXT}, {"prompt": "Once"}):
        assert http.post("/v1/quote", json=body).json()["object"] == "quote"
    assert len(parsed) == 2


def test_an_unknown_endpoint_is_refused(http: httpx2.Client) -> None:
    refused = http.post("/v1/quote", params={"endpoint": "/v1/embeddings"}, json={"input": "Hi"})
    assert refused.status_code == 400
    assert "endpoint" in refused.json()["error"]["message"]


def test_the_description_has_each_body(http: httpx2.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]

    def schema_of(path: str) -> dict[str, Any]:
        content = paths[path]["post"]["requestBody"]["content"]
        schema: dict[str, Any] = content["application/json"]["schema"]
        return schema

    assert schema_of("/v1/quote") == {"anyOf": [schema_of(path) for path in BODIES]}
    names = [each["name"] for each in paths["/v1/quote"]["post"]["parameters"]]
    assert {"endpoint", "X-Priority"} < {*names}
    assert len(names) == len({*names})
