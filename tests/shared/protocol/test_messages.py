"""Messages in one form, whoever sends them: a request has only that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from promptq.producer.clients.request_builder import compose
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.messages import MAX_ARGUMENT_VALUES
from promptq.shared.protocol.request import Request


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads a payload that any Redis client may have written, as a worker does."""
    clean = Request.parse(json.dumps({"messages": messages})).messages
    assert clean is not None
    assert Request.build({"messages": clean}).messages == clean
    (sent,) = compose([{"messages": list(messages)}])
    assert Request.parse(sent.request.to_payload()).messages == clean
    return clean


def calling(arguments: Any, **function: Any) -> dict[str, Any]:
    called = {"name": "f", "arguments": arguments, **function}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": called}]}


def test_parts_become_one_text_and_nothing_becomes_an_empty_one() -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    assert read(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
    ]


def test_a_function_call_is_a_tool_call() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    called = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read(
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "2"},
    ) == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "name": "f", "content": "2"},
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        ("null", {}),
        ("", {}),
        (" \n", {}),
        ('{"a": 1, "b": "c', {"a": 1}),
        ('{"her', {}),
    ],
)
def test_arguments_become_objects(arguments: Any, expected: dict[str, Any]) -> None:
    assert read(calling(arguments)) == [calling(expected)]


@pytest.mark.parametrize("arguments", ["[]", "5", '"a"', "true", "a", "{a}", '{"a": NaN}', "[1"])
def test_arguments_that_are_no_object_are_named(arguments: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read({"role": "user", "content": "Hi"}, calling(arguments))
    where = "messages[1].tool_calls[0].function.arguments"
    assert str(caught.value) == f"{where}: must be a JSON object, got {arguments!r}"
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (calling([]), "messages[0].tool_calls[0].function.arguments: must be a JSON object, got a"),
        (calling(10**5000), "messages[0].tool_calls[0].function.arguments: must be a JSON object"),
        (calling("{}", name=None), "messages[0].tool_calls[0].function.name: must be the name of"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function: must be"),
        ({"role": "assistant", "tool_calls": [7]}, "messages[0].tool_calls[0].function: must be"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls: must be a list, got an"),
        ({"content": "Hi"}, "messages[0].role: must be a text such as 'user', got nothing"),
        ({"role": 5, "content": "Hi"}, "messages[0].role: must be a text such as 'user', got a"),
        ({"role": "user", "content": 5}, "messages[0].content: must be text or a list of parts"),
        ({"role": "user", "content": {}}, "messages[0].content: must be text or a list of parts"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            "messages[0].content[1]: a part of type 'input_audio' is not served, only text and",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            'messages[0].content[0]: must be like {"type": "text", "text": TEXT}, got an object'
            " with nothing as text",
        ),
        (
            {"role": "user", "content": ["a", 5]},
            'messages[0].content[1]: must be like {"type": "text", "text": TEXT}, got a number',
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": {"a": 1}},
            "messages[0].reasoning_content: must be text, got an object",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "[]"}},
            "messages[0].function_call.arguments: must be a JSON object, got '[]'",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request.build({"messages": [message]})
    assert str(caught.value).startswith(said)
    assert caught.value.field == "messages"


def test_values_in_arguments_are_counted_before_they_are_parsed() -> None:
    many = "[" + "0," * (MAX_ARGUMENT_VALUES // 2) + "0]"
    assert read(calling(f'{{"a": {many}}}'))
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\].* hold more than 100000 JSON"):
        read(*[calling(f'{{"a": {many}}}')] * 2)
    text = json.dumps({"a": '[,{"\\' * MAX_ARGUMENT_VALUES})
    assert read(calling(text)) == [calling(json.loads(text))]
    unfinished = '{"a": "' + '\\"' * 2**20 + "," * MAX_ARGUMENT_VALUES
    assert read(calling(unfinished)) == [calling({})]
