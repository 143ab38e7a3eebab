"""Where the text matters: tools, schemas and limits, with the shipped model behind the gateway."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.producer.gateway.living import LiveGateway

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def test_a_text_has_the_tokens_that_logprobs_name(stories: OpenAI) -> None:
    """Their texts, put together, are the answer; so are those of the likeliest tokens."""
    got = stories.completions.create(
        model="", prompt="Once upon a time", max_tokens=20, temperature=0, logprobs=2
    )
    [choice] = got.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.top_logprobs is not None
    for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert max(top, key=lambda name: top[name]) == token


def test_stop_strings(stories: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "", "messages": MESSAGES, "temperature": 0}
    whole = stories.chat.completions.create(**fields, max_tokens=60).choices[0].message.content
    assert whole is not None
    word = whole.split()[5]
    got = stories.chat.completions.create(**fields, max_tokens=60, stop=[word]).choices[0]
    assert got.message.content == whole[: whole.index(word)]
    assert got.finish_reason == "stop"


NAMED = {"type": "function", "function": {"name": "paint"}}


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_the_call_of_a_tool(stories: OpenAI, tool_choice: Any) -> None:
    got = stories.chat.completions.create(
        model="", messages=MESSAGES, tools=[TOOL], tool_choice=tool_choice, seed=3
    )
    [choice] = got.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    # The answer can be sent back, as a turn of the same chat.
    turns = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    after = stories.chat.completions.create(
        model="", messages=turns, tools=[TOOL], max_tokens=5, temperature=0
    )
    assert after.choices[0].message.content


def test_the_streamed_call_of_a_tool(stories: OpenAI, stories_gateway: LiveGateway) -> None:
    """OpenAI's client puts the pieces together to what it gets unstreamed.

    The call has the same id when the stream is read again.
    """
    fields: dict[str, Any] = {
        "model": "", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "seed": 3,
    }  # fmt: skip
    whole = stories.chat.completions.create(**fields).choices[0]
    with stories.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    [ours], [theirs] = streamed.message.tool_calls, whole.message.tool_calls
    assert (ours.function.name, ours.function.arguments) == (
        theirs.function.name,
        theirs.function.arguments,
    )
    raw = stories.chat.completions.with_raw_response.create(**fields, stream=True)
    chunks: Any = list(raw.parse())
    calls = [chunk.choices[0].delta.tool_calls for chunk in chunks]
    assert sum(map(bool, calls)) > 1
    [named] = [call[0].id for call in calls if call and call[0].id]
    again = httpx2.get(stories_gateway.url + raw.headers["X-Stream-Url"], timeout=None)
    assert again.text.count(json.dumps(named)) == 1


def test_tools_that_need_not_be_called(stories: OpenAI) -> None:
    got = stories.chat.completions.create(
        model="", messages=MESSAGES, tools=[TOOL], max_tokens=8, temperature=0
    )
    assert got.choices[0].message.content
    assert got.choices[0].message.tool_calls is None


class Painting(BaseModel):
    colour: str
    size: int


def test_an_answer_by_schema(stories: OpenAI) -> None:
    """OpenAI's client makes the schema from a class, and reads the answer into it."""
    got = stories.chat.completions.parse(
        model="", messages=MESSAGES, response_format=Painting, seed=3, max_tokens=200
    )
    assert isinstance(got.choices[0].message.parsed, Painting)


def test_a_json_object_in_a_stream(stories: OpenAI) -> None:
    stream = stories.chat.completions.create(
        model="", messages=MESSAGES, response_format={"type": "json_object"}, seed=2,
        max_tokens=60, stream=True,
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.startswith("{")
    if chunks[-1].choices[0].finish_reason == "stop":
        json.loads(text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_limit(stories: OpenAI, stream: bool) -> None:
    """Only a worker can count its tokens; a stream too gets the status, for it has not begun."""
    with pytest.raises(openai.BadRequestError) as raised:
        stories.completions.create(model="", prompt="once " * 20000, stream=stream)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 2048" in str(raised.value)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_refused(stories: OpenAI, stream: bool) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError) as raised:
        stories.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "Hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            stream=stream,
        )
    assert (raised.value.param, raised.value.code) == (
        "response_format.json_schema.schema.uniqueItems",
        "unsupported",
    )
