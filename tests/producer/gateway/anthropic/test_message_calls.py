"""Calls of /v1/messages: what they become in the queue, and how they are refused."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import httpx2
import pytest

from promptq.shared.protocol.request import Request
from tests.producer.gateway.living import LiveGateway, make_key
from tests.producer.gateway.played import FIELDS, TOOL, TURNS, anthropic_of, message_of
from tests.producer.playing import HandWorker


def test_every_field_becomes_that_of_a_payload(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    kept: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "me"},
        "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "bad_words": ["c"],
        "stop_token_ids": [3], "ignore_eos": True, "speculative_tokens": 0, "priority": -3,
        "deadline_ms": 60000, "completion_window": "2h", "deadline_policy": "refuse",
        "cache_salt": "s", "tenant": "them", "seed": 7,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"65": 3},
        "webhook_url": "http://127.0.0.1:9/", "resume": "exact_only",
    }  # fmt: skip
    ephemeral = {"type": "ephemeral"}
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    with anthropic_of(gateway) as client:
        _, payload = message_of(
            client, own_worker, max_tokens=9, stop_sequences=["x"], service_tier="auto",
            system=[{"type": "text", "text": "Be brief.", "cache_control": ephemeral}],
            tools=[{**TOOL, "cache_control": ephemeral, "type": "custom"}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={
                "effort": "low", "format": {"type": "json_schema", "schema": schema},
            },
            cache_control=ephemeral, extra_body=kept,
            messages=[*TURNS, {"role": "assistant", "content": "{"}],
        )  # fmt: skip
    function = {"name": "paint", "description": "Paints.", "parameters": TOOL["input_schema"]}
    expected = {
        **kept, "max_tokens": 9, "stop": ["x"],
        "messages": [{"role": "system", "content": "Be brief."}, *TURNS],
        "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema, "strict": True},
        },
        "output_prefix": {"text": "{"},
    }  # fmt: skip
    assert payload == expected
    none_here = {"prompt", "embed", "tokenize", "logprobs", "prompt_logprobs"}
    other_ways = {"model", "version", "idempotency_key", "trace_context", "service_tier"}
    other_ways |= {"expected_tokens", "session"}
    assert expected.keys() | other_ways | none_here == Request.model_fields.keys()


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {
                "thinking": {"type": "disabled"},
                "extra_body": {"chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            },
            {"reasoning_effort": "none", "enable_thinking": True, "a": 1},
        ),
    ],
)
def test_thinking_goes_to_the_template(
    gateway: LiveGateway, own_worker: HandWorker, fields: dict[str, Any], variables: Any
) -> None:
    """Variables that the call sets itself have precedence."""
    with anthropic_of(gateway) as client:
        _, payload = message_of(client, own_worker, **fields)
    assert payload.get("chat_template_kwargs") == variables


def test_a_conversation_becomes_a_chat(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """Turns of one role that follow each other become one, as Anthropic's API has it."""
    text = {"type": "text", "text": "b", "citations": None}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, text]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Look:"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": None},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "5", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2", "content": [text, text]},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "Go on."},
        ]},
        {"role": "system", "content": "Now."},
    ]  # fmt: skip

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    with anthropic_of(gateway) as client:
        _, payload = message_of(client, own_worker, messages=messages, system="First.")
    assert payload["messages"] == [
        {"role": "system", "content": "First."},
        {"role": "user", "content": "ab\n\nc"},
        {
            "role": "assistant", "content": "Look:", "reasoning_content": "Hm.",
            "tool_calls": [call("t1", "f", {"a": 1}), call("t2", "g", {})],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "5"},
        {"role": "tool", "tool_call_id": "t2", "content": "bb"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Now."},
    ]  # fmt: skip
    assert "output_prefix" not in payload


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "paint"}, {"type": "function", "function": {"name": "paint"}}),
    ],
)
def test_the_choice_of_a_tool(
    gateway: LiveGateway, own_worker: HandWorker, choice: Any, told: Any
) -> None:
    with anthropic_of(gateway) as client:
        _, payload = message_of(client, own_worker, tools=[TOOL], tool_choice=choice)
    assert payload["tool_choice"] == told


FILE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}


def saying(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [*TURNS, {"role": role, "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"temperature": 1.5}, "temperature: "),
        ({"top_p": 2}, "top_p: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages: message 0: role 'boss' is"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages: message 0: role '[]' is not"),
        ({"messages": [{"role": "user"}]}, "messages: message 0: content must be text or a list"),
        (saying("user", FILE), "messages: message 1: a block of type 'document' is not served"),
        (
            saying("user", {"type": "image", "source": {"type": "file", "file_id": 7}}),
            "messages: message 1: the source of an image must be of type base64, url or file",
        ),
        (saying("user", IMAGE), "messages[0].content: picture 0: the picture is no base64"),
        (saying("assistant", IMAGE), "messages: message 1: a block of type 'image' is not served"),
        (saying("user", {"type": "document"}), "messages: message 1: a block of type 'document'"),
        (saying("user", USE), "messages: message 1: a block of type 'tool_use' is not served"),
        (saying("user", 7), "messages: message 1: a block of type '7'"),
        (saying("user", {"type": "text"}), "messages: message 1: a block of type 'text' needs"),
        (saying("user", {"type": "tool_result"}), "messages: message 1: a tool_result needs tool"),
        (
            saying("user", {"type": "tool_result", "tool_use_id": "t", "content": [FILE]}),
            "messages: message 1: tool_result: a block of type 'document' is not served",
        ),
        (saying("assistant", USE), "messages: message 1: may contain only text"),
        (saying("assistant", {**USE, "input": "x"}), "messages: message 1: a tool_use needs"),
        (saying("assistant", {"type": "thinking"}), "messages: message 1: a block of type 'think"),
        ({"system": [IMAGE]}, "system: a block of type 'image' is not served"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools: a tool of type 'web_s"),
        ({"tools": [{"name": "x"}]}, "tools: a tool must be like"),
        ({"tool_choice": {"type": "all"}}, "tool_choice: type 'all' is not one of"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice: "),
        ({"tool_choice": {"type": "auto", "x": 1}}, "tool_choice: 'x' is not one of"),
        ({"thinking": {"type": "deep"}}, "thinking: type 'deep' is not one of"),
        ({"thinking": {"depth": 3}}, "thinking: 'depth' is not one of"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: "),
        ({"output_config": {"x": 1}}, "output_config: 'x' is not one of"),
        ({"output_config": {"effort": 1}}, "output_config.effort: "),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: "),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"stop": ["x"]}, "stop: is not a field of this endpoint; use stop_sequences"),
        ({"output_prefix": {"text": "x"}}, "output_prefix: is not a field of this endpoint; use"),
        ({"logprobs": 2}, "logprobs: is not a field"),
        ({"tokenize": True}, "tokenize: is not a field"),
        ({"container": "x"}, "container: "),
        ({"n": 2}, "n: "),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: "),
        ({"idempotency_key": ""}, "idempotency_key: is empty"),
    ],
)
def test_what_is_refused(http: httpx2.Client, fields: dict[str, Any], told: str) -> None:
    """With Anthropic's error object, whose message begins with the name of the field."""
    answer = http.post("/v1/messages", json={**FIELDS, **fields})
    body = answer.json()
    assert (answer.status_code, body["type"]) == (400, "error")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(told)


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize(
    "fields",
    [
        {"thread": {"type": "create"}},
        {"context_management": {"edits": []}},
        {"context_management": {}, "thread": {"type": "continue"}},
    ],
)
def test_a_thread_is_refused_so_that_clients_go_on(
    http: httpx2.Client, path: str, size: int, fields: dict[str, Any]
) -> None:
    """Also when another process reads the body."""
    call = {"messages": [{"role": "user", "content": "x" * size}], **fields}
    if "count" not in path:
        call["max_tokens"] = 1
    answer = http.post(path, json=call)
    details = answer.json()["error"]["details"]
    assert answer.status_code == 400
    assert details["error_code"] == "thread_unsupported_request"
    assert sorted(details["unsupported"]) == sorted(fields)


def test_the_tool_runner_goes_on_without_a_thread(stories_gateway: LiveGateway) -> None:
    heroes: list[str] = []

    @anthropic.beta_tool
    def paint(hero: Literal["fox", "owl"]) -> str:
        """Paint a hero."""
        heroes.append(hero)
        return "painted"

    for stream in (False, True):
        with anthropic_of(stories_gateway) as client:
            fields: Any = {**FIELDS, "tool_choice": {"type": "any"}, "stream": stream}
            runner: Any = client.beta.messages.tool_runner(
                **fields, tools=[paint], max_iterations=2
            )
            assert runner.until_done().stop_reason == "tool_use"
    assert len(heroes) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_worker_refuses(stories_gateway: LiveGateway, stream: bool) -> None:
    """By the name that the field has here, and with a status, as nothing was sent before."""
    turns: Any = [*TURNS, {"role": "assistant", "content": "No call"}]
    fields: Any = {**FIELDS, "tools": [TOOL], "tool_choice": {"type": "any"}}
    with anthropic_of(stories_gateway) as client:
        with pytest.raises(anthropic.BadRequestError) as raised:
            client.messages.create(**{**fields, "messages": turns}, stream=stream)
        assert raised.value.type == "invalid_request_error"
        assert raised.value.api_message is not None
        assert raised.value.api_message.startswith("messages: does not fit tool")
        turns = [{"role": "user", "content": "once " * 20000}]
        with pytest.raises(anthropic.BadRequestError) as raised:
            client.messages.create(**{**FIELDS, "messages": turns}, stream=stream)
        assert raised.value.error_code == "context_length_exceeded"


def test_a_key_comes_in_any_of_the_headers(
    gateway: LiveGateway, redis_url: str, own_worker: HandWorker
) -> None:
    """Anthropic's clients have sent it in two of them; the errors are Anthropic's."""
    secret = make_key(redis_url, "mine", tenant="them")
    with anthropic_of(gateway, secret) as client:
        _, payload = message_of(client, own_worker)
        assert payload["tenant"] == "them"
    with httpx2.Client(base_url=gateway.url, timeout=30) as http:
        for name in ("X-Api-Key", "Api-Key", "Authorization"):
            value = f"Bearer {secret}" if name == "Authorization" else secret
            assert http.get("/v1/models", headers={name: value}).status_code == 200
            assert http.get("/v1/models", headers={name: f"{value}0"}).status_code == 401
        for headers in ({}, {"X-Api-Key": "pq-wrong"}):
            # The body is not JSON, but nobody reads it.
            refused = http.post("/v1/messages", content=b"{", headers=headers)
            body = refused.json()
            assert (refused.status_code, body["type"]) == (401, "error")
            assert body["error"]["type"] == "authentication_error"
            assert body["error"]["details"] == {"error_code": "invalid_api_key"}


def test_a_rate_that_is_used_up(gateway: LiveGateway, redis_url: str) -> None:
    secret = make_key(redis_url, "slow", requests_per_minute=1)
    with anthropic_of(gateway, secret) as client:
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**FIELDS, "messages": []})
        with pytest.raises(anthropic.RateLimitError) as raised:
            client.messages.create(**FIELDS)
    assert raised.value.type == "rate_limit_error"
    assert int(raised.value.response.headers["retry-after"]) > 0


def test_paths_beside_it(http: httpx2.Client) -> None:
    """Their errors are Anthropic's, too."""
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ):
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert "type" not in http.get("/v1/messagesx").json()


def test_a_large_body_is_read_like_a_small_one(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """In another process, which tells as much of it."""
    large = "é" * 100_000
    turns = [{"role": "user", "content": large}, {"role": "assistant", "content": "Hi"}]
    with anthropic_of(gateway) as client:
        got, payload = message_of(client, own_worker, "Hi there", messages=turns)
        assert payload["messages"] == turns[:1]
        assert got.content[0].model_dump()["text"] == " there"
        with pytest.raises(anthropic.BadRequestError, match="message 0: role 'boss' is not one"):
            client.messages.create(**{**FIELDS, "messages": [{"role": "boss", "content": large}]})


def test_an_idempotency_key_gives_the_same_message(letters_gateway: LiveGateway) -> None:
    """Also as a stream, and not that of a count."""
    key = {"Idempotency-Key": "mine"}
    with anthropic_of(letters_gateway) as client:
        first = client.messages.create(**FIELDS, extra_headers=key)
        assert client.messages.create(**FIELDS, extra_headers=key) == first
        with client.messages.stream(**FIELDS, extra_headers=key) as stream:
            assert stream.get_final_message().id == first.id
        count = client.messages.count_tokens(model="", messages=TURNS, extra_headers=key)
    cached = first.usage.cache_read_input_tokens or 0
    assert count.input_tokens == first.usage.input_tokens + cached


def test_the_tokens_of_a_conversation(stories_gateway: LiveGateway) -> None:
    """The worker counts as many as it computes."""
    fields: Any = {"model": "", "system": "Be brief.", "messages": TURNS, "tools": [TOOL]}
    with anthropic_of(stories_gateway) as client:
        count = client.messages.count_tokens(**fields).input_tokens
        usage = client.messages.create(**fields, max_tokens=1).usage
        assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        begun = [*TURNS, {"role": "assistant", "content": "Once upon a time"}]
        assert client.messages.count_tokens(**{**fields, "messages": begun}).input_tokens > count
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.count_tokens(**fields, extra_body={"max_tokens": 3})
