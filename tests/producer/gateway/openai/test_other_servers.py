"""Programs that were written for other servers send these calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from promptq.producer.apis.completions.tolerated_fields import FieldsWithoutEffect, warn_of
from tests.producer.gateway.living import LiveGateway, bearer, make_key
from tests.producer.playing import HandWorker
from tests.support.model_free import text_of
from tests.support.roles import as_role

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}
FIND: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {}}}
WEB_SEARCH: dict[str, Any] = {"type": "web_search", "name": "web_search"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_ANY_VALUE: dict[str, Any] = {
    "user": "a",
    "store": True,
    "safety_identifier": "a",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "a"},
    "verbosity": "low",
    "spaces_between_special_tokens": False,
    "early_stopping": True,
    "length_penalty": 2.0,
    "guided_decoding_backend": "guidance",
}
OF_ONE_VALUE: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "return_tokens_as_token_ids": False,
    "use_beam_search": False,
    "best_of": 1,
}


@pytest.fixture(scope="module")
def calls(letters_gateway: LiveGateway) -> Any:
    with httpx2.Client(base_url=letters_gateway.url, timeout=30) as client:
        yield client


def test_fields_without_effect_change_nothing(calls: httpx2.Client) -> None:
    assert {*OF_ANY_VALUE} == {*FieldsWithoutEffect.model_fields}
    for path, own in (
        ("chat/completions", {**CHAT, "modalities": ["text"], "echo": False}),
        ("completions", {"prompt": "Hi", "suffix": ""}),
    ):
        body = {**own, **OF_ANY_VALUE, **OF_ONE_VALUE, "max_tokens": 3, "seed": 3, "n": 1}
        answer = calls.post(f"/v1/{path}", json=body).json()
        choice = answer["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == text_of(3, 3)


def test_the_log_names_each_of_them_once(
    calls: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields whose only value is what happens anyway need no word."""
    warn_of.cache_clear()
    for field in ({"verbosity": "low"}, {"verbosity": "high"}, {"add_generation_prompt": True}):
        calls.post("/v1/chat/completions", json={**CHAT, **field, "max_tokens": 1})
    lines = [line.getMessage() for line in caplog.records if line.name == "promptq.calls"]
    assert lines == ["a field of a call has no effect: verbosity"]


LARK = 'start: "a" "::="'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, not value) for name, value in OF_ONE_VALUE.items() if name != "best_of"),
        ("best_of", 2),
        ("modalities", ["text", "audio"]),
        ("echo", True),
        ("functions", [{"name": "look"}]),
        ("function_call", "auto"),
        ("structured_outputs", {"grammar": "root ::= x"}),
        ("structured_outputs", {"grammar": " "}),
        ("guided_grammar", 'start: "a"\n<b> ::= "c"'),
        ("guided_grammar", ["start"]),
        ("structured_outputs", {"json": 3}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"regex": "a", "disable_any_whitespace": True}),
        ("guided_regex", 3),
        ("guided_regex", ""),
        ("guided_choice", "yes"),
        ("guided_choice", []),
        ("guided_choice", ["yes", ""]),
        ("guided_json", "text"),
        ("tool_choice", {"type": "allowed_tools"}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [FIND]}),
        ("tools", [LOOK, WEB_SEARCH]),
        ("stream_options", {"x": True}),
        ("reasoning_depth", "low"),
    ],
)
def test_what_is_not_served_is_refused_by_name(http: httpx2.Client, field: str, value: Any) -> None:
    body = {**CHAT, "tools": [LOOK], "stream": True, field: value}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert "do you mean" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_tool_of_another_type_is_refused_wherever_tools_are_taken(
    http: httpx2.Client, path: str
) -> None:
    """Also one that `tool_choice` does not show to the model."""
    named = {"type": "function", "function": {"name": LOOK["function"]["name"]}}
    choices = (
        [{}]
        if path == "/tokenize"
        else [
            {},
            {"tool_choice": "none"},
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [named]}},
        ]
    )
    for choice in choices:
        body = {**CHAT, "tools": [LOOK, WEB_SEARCH], **choice}
        error = http.post(path, json=body).json()["error"]
        assert error["param"] == "tools"
        assert "'web_search' is not served" in error["message"]


def payload_of(http: httpx2.Client, worker: HandWorker, **fields: Any) -> dict[str, Any]:
    """The payload of the request that a call becomes."""
    with worker.finishing(["x"]):
        answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
    return worker.payload(answer.json()["id"])


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_vllms_names_of_a_schema(
    http: httpx2.Client, own_worker: HandWorker, fields: dict[str, Any]
) -> None:
    asked = payload_of(http, own_worker, **fields)["response_format"]
    assert (asked["type"], asked["json_schema"]["schema"]) == ("json_schema", SCHEMA)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"type": "regex", "regex": "a+"}),
        ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"type": "choice", "choice": ["a"]}),
        ({"guided_choice": ["a"]}, {"type": "choice", "choice": ["a"]}),
        (
            {"structured_outputs": {"regex": "a+", "json": None}, "guided_regex": "a+"},
            {"type": "regex", "regex": "a+"},
        ),
        ({"structured_outputs": {"grammar": LARK}}, {"type": "grammar", "grammar": LARK}),
        (
            {"structured_outputs": {"grammar": LARK, "json_object": False, "_backend": None}},
            {"type": "grammar", "grammar": LARK},
        ),
        ({"guided_grammar": LARK}, {"type": "grammar", "grammar": LARK}),
    ],
)
def test_vllms_names_of_other_forms(
    http: httpx2.Client, own_worker: HandWorker, fields: dict[str, Any], asked: dict[str, Any]
) -> None:
    assert payload_of(http, own_worker, **fields)["response_format"] == asked


def test_two_forms_that_differ(http: httpx2.Client) -> None:
    body = {**CHAT, "structured_outputs": {"regex": "a"}, "guided_regex": "b"}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == "guided_regex: cannot be combined with structured_outputs"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(http: httpx2.Client, own_worker: HandWorker, mode: str) -> None:
    """The model sees no other tool."""
    named = {"type": "function", "function": {"name": "find"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    payload = payload_of(http, own_worker, tools=[LOOK, FIND], tool_choice=choice)
    assert (payload["tools"], payload["tool_choice"]) == ([FIND], mode)


def test_health(http: httpx2.Client) -> None:
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("origins", [["https://chat.example"], ["*"]])
def test_pages_of_other_sites(
    start_gateway: Callable[..., LiveGateway], redis_url: str, origins: list[str]
) -> None:
    """A browser asks first, without the key; then the page's own key counts."""
    gateway = start_gateway(http_cors_origins=origins)
    page = {"Origin": "https://chat.example"}
    asking = {"Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization,content-type"
    with httpx2.Client(base_url=gateway.url, headers=page, timeout=30) as client:
        before = client.options("/v1/chat/completions", headers=asking)
        without_key = client.get("/v1/models")
        key = make_key(as_role("operator", redis_url), "page")
        with_key = client.get("/v1/models", headers=bearer(key))
        other = client.options(
            "/v1/chat/completions", headers={**asking, "Origin": "https://bad.example"}
        )
    assert before.status_code == 200
    assert "authorization" in before.headers["Access-Control-Allow-Headers"].lower()
    assert without_key.status_code == 401
    assert with_key.status_code == 200
    for answer in (before, without_key, with_key):
        assert answer.headers["Access-Control-Allow-Origin"] in (page["Origin"], "*")
    assert (other.status_code == 200) == (origins == ["*"])


def test_pages_of_other_sites_are_not_answered_by_default(http: httpx2.Client) -> None:
    page = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = http.options("/v1/chat/completions", headers=page)
    assert "Access-Control-Allow-Origin" not in answer.headers


def called_with(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(("arguments", "read"), [('{"her', {}), ('{"a": 1, "b": [2', {"a": 1})])
def test_a_call_that_was_cut_may_be_sent_back(
    http: httpx2.Client, own_worker: HandWorker, arguments: str, read: dict[str, Any]
) -> None:
    """Its arguments go as far as they came."""
    payload = payload_of(http, own_worker, **called_with(arguments))
    (call,) = payload["messages"][1]["tool_calls"]
    assert read.items() <= call["function"]["arguments"].items()


@pytest.mark.parametrize("arguments", ['{"a": NaN}', "[" * 100_000, "her"])
def test_arguments_that_are_no_object_are_refused(http: httpx2.Client, arguments: str) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **called_with(arguments)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert error["message"].startswith("messages[1].tool_calls[0].function.arguments: must be a")
    assert len(error["message"]) < 200


def test_a_seed_of_minus_one_is_none(http: httpx2.Client, own_worker: HandWorker) -> None:
    assert "seed" not in payload_of(http, own_worker, seed=-1)
