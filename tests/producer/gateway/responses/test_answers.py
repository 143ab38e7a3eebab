"""Answers of /v1/responses through OpenAI's own client, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from promptq.producer.apis.responses.ended_output import ending_of
from promptq.shared.protocol.events import Stats, TokenEvent
from promptq.shared.protocol.request import FinishReason, Request
from tests.producer.gateway.living import LiveGateway
from tests.producer.gateway.played import in_background, openai_of, response_of, tell_style
from tests.producer.playing import HandWorker
from tests.support.model_free import text_of

TOOL: Any = {
    "type": "function", "name": "paint", "strict": True,
    "parameters": {
        "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"], "additionalProperties": False,
    },
}  # fmt: skip
LOGPROBS: Any = ["message.output_text.logprobs"]


def test_a_response(letters: OpenAI) -> None:
    got = letters.responses.create(
        model="model-free", input="Once", max_output_tokens=7, extra_body={"seed": 3}
    )
    assert re.fullmatch("resp_[0-9a-f]{32}", got.id)
    assert (got.object, got.model) == ("response", "model-free")
    assert (got.output_text, got.status) == (text_of(3, 7), "incomplete")
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens"
    [message] = got.output
    assert (message.type, message.status) == ("message", "incomplete")
    assert got.usage is not None
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens) == (4, 7, 11)


def test_a_stream_of_a_call_with_any_characters(letters_gateway: LiveGateway) -> None:
    """Characters that end a line for some readers are escaped, also when a stream is read again."""
    words = "é \U0001f98a a\x85b\u2028c\u2029d"
    fields = {"input": "Once", "instructions": words, "metadata": {"of": words}}
    with httpx2.Client(base_url=letters_gateway.url, timeout=30) as http:
        first = http.post("/v1/responses", json={**fields, "max_output_tokens": 2, "stream": True})
        again = http.get(first.headers["x-stream-url"])
    assert first.text == again.text
    events = [json.loads(it[6:]) for it in first.text.splitlines() if it.startswith("data: ")]
    assert {it for it in first.text.splitlines() if it[:5] not in ("data:", "event")} == {""}
    assert events[-1]["type"] == "response.incomplete"
    told = [it["response"] for it in events if "response" in it]
    assert {(it["instructions"], it["metadata"]["of"]) for it in told} == {(words, words)}


def test_the_events_of_a_stream(letters: OpenAI) -> None:
    """In OpenAI's order. Each letter has a number, and so has each event without text."""
    events = list(
        letters.responses.create(
            model="", input="Once", max_output_tokens=3, stream=True, extra_body={"seed": 3}
        )
    )
    text = text_of(3, 3)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 3, "output_text.done", "content_part.done", "output_item.done",
        "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == [*range(11)]
    told: list[Any] = [*events]
    assert [event.delta for event in told[4:7]] == list(text)
    assert told[7].text == told[8].part.text == told[9].item.content[0].text == text
    assert {event.item_id for event in told[3:9]} == {told[2].item.id} == {told[9].item.id}
    assert (told[0].response.status, told[0].response.output) == ("in_progress", [])
    whole = letters.responses.retrieve(told[0].response.id)
    assert told[10].response == whole


def test_a_whole_answer_says_the_same_as_its_stream(letters: OpenAI) -> None:
    """OpenAI's client puts the events together."""
    fields: Any = {"model": "", "input": "Once", "max_output_tokens": 9, "include": LOGPROBS}
    whole = letters.responses.create(**fields, top_logprobs=1, extra_body={"seed": 3})
    with letters.responses.stream(**fields, top_logprobs=1, extra_body={"seed": 3}) as stream:
        last = [*stream][-1]
    assert last.type == "response.incomplete"
    ours, theirs = whole.output[0], last.response.output[0]
    assert ours.model_dump(exclude={"id"}) == theirs.model_dump(exclude={"id"})
    [part] = ours.model_dump()["content"]
    assert [it["token"] for it in part["logprobs"]] == list(text_of(3, 9))
    assert all(len(it["top_logprobs"]) == 1 for it in part["logprobs"])


def test_the_fields_of_the_call_are_returned(gateway: LiveGateway, own_worker: HandWorker) -> None:
    with openai_of(gateway) as client:
        got, _ = response_of(
            client, own_worker, input="Go", instructions="Be brief.", temperature=0.5, top_p=0.9,
            metadata={"a": "b"}, tools=[TOOL], tool_choice="none", max_output_tokens=8,
            reasoning={"effort": "low"}, user="me", parallel_tool_calls=False,
            extra_body={"presence_penalty": 0.5},
        )  # fmt: skip
        assert (got.status, got.output_text, got.error) == ("completed", "Hi", None)
        assert (got.instructions, got.temperature, got.top_p) == ("Be brief.", 0.5, 0.9)
        assert (got.metadata, got.tool_choice, got.max_output_tokens) == ({"a": "b"}, "none", 8)
        assert [it.model_dump(exclude_none=True) for it in got.tools] == [TOOL]
        assert got.reasoning is not None
        assert (got.reasoning.effort, got.user, got.parallel_tool_calls) == ("low", "me", False)
        assert (got.presence_penalty, got.frequency_penalty) == (0.5, 0)
        assert (got.store, got.background, got.previous_response_id) == (True, False, None)


def test_the_object_is_that_of_open_responses(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """Its members are in all events that have it, and in what is read later."""
    schema: Any = {"type": "json_schema", "name": "tale", "schema": TOOL["parameters"]}
    bare: Any = {"type": "function", "name": "go"}
    stats = Stats(queue_ms=1000, prompt_ms=500, generation_ms=1500)
    with (
        openai_of(gateway) as client,
        in_background(client, own_worker, tools=[bare], text={"format": schema}) as (own_id, claim),
        httpx2.Client(base_url=gateway.url, timeout=30) as http,
    ):
        path = f"/v1/responses/{own_id}"
        active = http.get(path).json()
        own_worker.send(claim, "Hi", FinishReason.STOP, stats=stats)
        lines = http.get(path, params={"stream": True}).text.splitlines()
        frames = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        events = [json.loads(frame) for frame in frames]
        sent = [event["response"] for event in events if "response" in event]
        assert sent[-1] == http.get(path).json()
    assert [response["status"] for response in sent] == [
        "queued",
        "queued",
        "in_progress",
        "completed",
    ]
    for each in (active, *sent):
        ended = each["created_at"] + 3 if each["status"] == "completed" else None
        assert each["completed_at"] == ended
        assert (each["presence_penalty"], each["frequency_penalty"]) == (0, 0)
        assert each["tools"] == [{**bare, "description": None, "parameters": None, "strict": None}]
        assert each["text"]["format"] == {**schema, "description": None, "strict": True}


@pytest.mark.parametrize("took_ms", [float("nan"), float("inf"), -5e9, 1e300])
def test_a_time_that_a_stranger_wrote(took_ms: float) -> None:
    stats = Stats.model_construct(queue_ms=took_ms)  # not every value passes its checks
    event = TokenEvent(index=0, token_ids=[], text="", finish_reason=FinishReason.STOP, stats=stats)
    assert ending_of(event).took_ms == 0


def test_every_field_becomes_that_of_a_payload(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    known: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}}
    extra: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "bad_words": ["c"],
        "stop_token_ids": [3], "ignore_eos": True, "speculative_tokens": 0, "priority": -3,
        "deadline_ms": 60000, "completion_window": "2h", "deadline_policy": "refuse",
        "cache_salt": "s", "tenant": "them", "seed": 7, "stop": ["x"],
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"65": 3},
        "webhook_url": "http://127.0.0.1:9/", "resume": "exact_only",
        "output_prefix": {"text": "It"},
    }  # fmt: skip
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    described = {"name": "tale", "schema": schema, "strict": True}
    with openai_of(gateway) as client:
        _, payload = response_of(
            client, own_worker, input="Go", max_output_tokens=9, top_logprobs=2, include=LOGPROBS,
            tools=[TOOL], tool_choice="auto", reasoning={"effort": "low"},
            text={"format": {"type": "json_schema", **described}}, extra_body=extra, **known,
        )  # fmt: skip
    function = {name: value for name, value in TOOL.items() if name != "type"}
    expected = {
        **known, **extra, "messages": [{"role": "user", "content": "Go"}], "max_tokens": 9,
        "logprobs": 2, "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": described},
        "chat_template_kwargs": {"reasoning_effort": "low"},
    }  # fmt: skip
    assert payload == expected
    other_ways = {"prompt", "model", "version", "idempotency_key", "trace_context", "embed"}
    other_ways |= {"service_tier", "tokenize", "prompt_logprobs", "expected_tokens", "session"}
    assert expected.keys() | other_ways == Request.model_fields.keys()


def test_items_become_the_messages_of_a_chat(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """In their easy and full forms, as OpenAI's client gives them back."""
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"},
        ]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "Look:", "annotations": []},
        ]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "6"},
        ]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": None},
    ]  # fmt: skip

    def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    with openai_of(gateway) as client:
        _, payload = response_of(client, own_worker, input=items, instructions="First.")
    assert payload["messages"] == [
        {"role": "system", "content": "First."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant", "content": "Look:", "reasoning_content": "Hm.",
            "tool_calls": [call("c1", "f", {"a": 1}), call("c2", "g", {})],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "6"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3", "f", {})]},
    ]  # fmt: skip


def test_calls_among_text_are_items_in_their_order(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """However the text is cut into events."""
    tell_style(own_worker)
    text = 'One <call>{"name": "paint", "arguments": {"colour": "red"}}</call>two'
    text += '<call>{"name": "paint", "arguments": {}}</call>'
    outputs, numbers = [], []
    for size in (1, 7, len(text)):
        with (
            openai_of(gateway) as client,
            in_background(client, own_worker, tools=[TOOL]) as (response_id, claim),
        ):
            for at in range(0, len(text), size):
                own_worker.send(claim, text[at : at + size])
            own_worker.finish(claim)
            whole = client.responses.retrieve(response_id)
            outputs.append([it.model_dump(exclude={"id", "call_id"}) for it in whole.output])
            events = list(client.responses.retrieve(response_id, stream=True))
            done = [it for it in events if it.type == "response.function_call_arguments.done"]
            numbers.append([it.sequence_number for it in done])
            assert [it.name for it in done] == ["paint", "paint"]
            calls = [it for it in whole.output if it.type == "function_call"]
            assert len({it.call_id for it in calls} | {it.id for it in calls}) == 4
    assert outputs[0] == outputs[1] == outputs[2]
    assert numbers[0] == numbers[1] == numbers[2]
    assert [it["type"] for it in outputs[0]] == [
        "message", "function_call", "message", "function_call",
    ]  # fmt: skip
    assert [it["content"][0]["text"] for it in outputs[0][::2]] == ["One ", "two"]
    assert [json.loads(it["arguments"]) for it in outputs[0][1::2]] == [{"colour": "red"}, {}]


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "name": "paint"}])
def test_a_call_that_is_required(stories: OpenAI, tool_choice: Any) -> None:
    """OpenAI's client reads its arguments, and the conversation goes on with what the tool said."""
    fields: Any = {"model": "", "tools": [TOOL], "extra_body": {"seed": 3}}
    got = stories.responses.create(input="Paint it.", tool_choice=tool_choice, **fields)
    assert got.status == "completed"
    [call] = got.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["colour"] in ("red", "blue")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    turns: Any = [{"role": "user", "content": "Paint it."}, call, output]
    after = stories.responses.create(input=turns, max_output_tokens=5, **fields)
    assert after.output_text
    stored = stories.responses.create(
        input=[output], previous_response_id=got.id, max_output_tokens=5, **fields
    )
    assert stored.usage is not None
    assert after.usage is not None
    assert stored.usage.input_tokens == after.usage.input_tokens
    assert stored.output_text == after.output_text


def test_a_streamed_call(stories: OpenAI) -> None:
    with stories.responses.stream(
        model="", input="Paint it.", tools=[TOOL], tool_choice="required", extra_body={"seed": 3}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    [call] = final.output
    assert call.type == "function_call"
    assert call.parsed_arguments is not None


class Tale(BaseModel):
    friends: int
    is_true: bool


def test_an_answer_by_schema(stories: OpenAI) -> None:
    got = stories.responses.parse(
        model="", input="A tale.", text_format=Tale, extra_body={"seed": 3}
    )
    assert isinstance(got.output_parsed, Tale)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not served"),
        ({"truncation": "auto"}, "truncation", "truncation: "),
        ({"conversation": "conv_1"}, "conversation", "is not a field"),
        ({"messages": []}, "messages", "use input"),
        ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
        ({"n": 2}, "n", "is not a field"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"include": ["everything"]}, "include", "'everything' is not served"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "'xml' is not one of"),
        ({"text": {"format": "text"}}, "text.format", 'an object, such as {"type": "text"}'),
        ({"text": {"format": "json_object"}}, "text.format", "must be an object"),
        ({"text": {"form": 1}}, "text", "'form' is not one of"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format: json_schema"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' is not one of"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice",
            "and tools",
        ),
        ({"max_output_tokens": 3, "min_tokens": 4}, "min_tokens", "more than max_tokens"),
        ({"background": True, "store": False}, "background", "needs store"),
        ({"reasoning": {"depth": 3}}, "reasoning", "'depth' is not one of"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be a text"),
        ({"input": []}, "input", "is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item 0: type 'item_ref"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input", "role 'boss' is not one of"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "needs call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
            "input",
            "item 0: arguments must be a JSON object, as text, got '[1]'",
        ),
        ({"input": [7]}, "input", "item 0: is not an object"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": 7}]}]},
            "input",
            "'input_image' is not served",
        ),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "no response 'resp_x'"),
        ({"temperature": 9}, "temperature", "temperature: "),
    ],
)
def test_what_is_refused(
    http: httpx2.Client, fields: dict[str, Any], param: str, told: str
) -> None:
    """With one sentence about the field, by the name that it has here."""
    answer = http.post("/v1/responses", json={"input": "Go", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(param)
    assert told in error["message"]


@pytest.mark.parametrize("name", ["compact", "input_tokenz", "resp_x"])
def test_calls_that_are_not_served(http: httpx2.Client, name: str) -> None:
    answer = http.post(f"/v1/responses/{name}", json={"input": "Go"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "path_not_found")
    answer = http.post(f"/v1/responses/resp_{'0' * 32}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, DELETE")


def test_the_tokens_of_a_conversation(stories: OpenAI) -> None:
    """The worker counts as many as it computes, with those of the response before."""
    fields: Any = {"model": "", "instructions": "Be brief.", "tools": [TOOL]}
    first = stories.responses.create(**fields, input="Hello", max_output_tokens=3)
    fields |= {"input": "A tale.", "previous_response_id": first.id}
    counted = stories.responses.input_tokens.count(**fields)
    got = stories.responses.create(**fields, max_output_tokens=3)
    assert got.usage is not None
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens", got.usage.input_tokens,
    )  # fmt: skip
    for wrong, message in (
        ({"input": "A tale. " * 8000}, "^Error code: 400 .*maximum context length"),
        ({"extra_body": {"max_output_tokens": 3}}, "max_output_tokens: is not a field"),
        ({"extra_body": {"text": {"format": "xml"}}}, r"text\.format: 'xml' is not one of"),
        ({"extra_body": {"messages": []}}, "messages: .* use input"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            stories.responses.input_tokens.count(**{**fields, **wrong})


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(letters: OpenAI, stream: bool) -> None:
    """The call gets an error status, since nothing was sent before, and nothing is stored."""
    with pytest.raises(openai.BadRequestError) as raised:
        letters.responses.create(model="", input="a" * 5000, stream=stream)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.NotFoundError):
        letters.responses.retrieve(raised.value.response.headers.get("x-request-id", "resp_x"))


def test_a_failure_after_the_first_token(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """The last event has the error and what was written, and so has the response later."""
    with openai_of(gateway) as client:
        with in_background(client, own_worker) as (response_id, claim):
            own_worker.send(claim, "Half")
            error = {"type": "internal_error", "message": "the worker broke"}
            own_worker.send(claim, "", FinishReason.ERROR, error=error)
        *_, last = client.responses.retrieve(response_id, stream=True)
        assert last.type == "response.failed"
        assert last.response == client.responses.retrieve(response_id)
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (
        "server_error", "the worker broke",
    )  # fmt: skip
    assert last.response.output_text == "Half"


def test_an_idempotency_key_gives_the_same_response(letters: OpenAI) -> None:
    """Also as a stream, and not that of a chat."""
    fields: Any = {
        "model": "", "input": "Once", "max_output_tokens": 3,
        "extra_headers": {"Idempotency-Key": "mine"},
    }  # fmt: skip
    first = letters.responses.create(**fields)
    assert letters.responses.create(**fields) == first
    *_, last = letters.responses.create(**fields, stream=True)
    assert last.type == "response.incomplete"
    assert last.response == first
    chat = letters.chat.completions.create(
        model="", messages=[{"role": "user", "content": "Once"}], max_tokens=3,
        extra_headers={"Idempotency-Key": "mine"},
    )  # fmt: skip
    assert chat.id.startswith("chatcmpl-")


def test_a_large_body_is_read_like_a_small_one(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """In another process, with the conversation before it."""
    large = "x" * 100_000
    with openai_of(gateway) as client:
        first, _ = response_of(client, own_worker, input=large, instructions="Be brief.")
        assert first.instructions == "Be brief."
        again, payload = response_of(
            client, own_worker, input="é" + large, previous_response_id=first.id
        )
        assert [it["content"] for it in payload["messages"]] == [large, "Hi", "é" + large]
        assert again.previous_response_id == first.id
        [item] = client.responses.input_items.list(again.id).data
    assert item.type == "message"
    assert item.content[0].model_dump()["text"] == "é" + large
