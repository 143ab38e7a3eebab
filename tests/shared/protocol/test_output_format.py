"""Requests may ask for a format of their output."""

from __future__ import annotations

from typing import Any

import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import (
    NO_ARGUMENTS,
    ChoiceOutput,
    GrammarOutput,
    JsonOutput,
    RegexOutput,
    ToolCallOutput,
)
from promptq.shared.protocol.request import Request

SCHEMA = {"type": "object", "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MANY = {"type": "object", "properties": {f"p{number}": {} for number in range(8193)}}
MANY_PARAMETERS = {"type": "function", "function": {"name": "g", "parameters": MANY}}
CHAT = [{"role": "user", "content": "hello"}]


def build(**fields: Any) -> Request:
    return Request.build({"messages": CHAT, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [{"whatever": "a template may take"}], "tool_choice": "none"},
    ],
)
def test_any_text_unless_something_is_asked_for(fields: dict[str, Any]) -> None:
    assert build(**fields).wanted_output is None


def test_json() -> None:
    assert build(response_format={"type": "json_object"}).wanted_output == JsonOutput(
        {"type": "object"}, strict=True
    )
    for described, strict in (({}, True), ({"strict": None}, True), ({"strict": False}, False)):
        described = {"name": "n", "description": "d", "schema": SCHEMA, **described}
        request = build(response_format={"type": "json_schema", "json_schema": described})
        assert request.wanted_output == JsonOutput(SCHEMA, strict)
        assert Request.parse(request.to_payload()).wanted_output == request.wanted_output


def test_a_regex_a_choice_and_a_grammar() -> None:
    asked = {"type": "regex", "regex": "a+"}
    assert build(response_format=asked).wanted_output == RegexOutput("a+")
    asked = {"type": "choice", "choice": ["a", "b"]}
    assert build(response_format=asked).wanted_output == ChoiceOutput(("a", "b"))
    asked = {"type": "grammar", "grammar": 'start: "::="'}
    assert build(response_format=asked).wanted_output == GrammarOutput('start: "::="')


def test_calls_of_tools() -> None:
    other = {"type": "function", "function": {"name": "g", "strict": False}}
    required = build(tools=[TOOL, other], tool_choice="required").wanted_output
    assert isinstance(required, ToolCallOutput)
    assert [(tool.name, tool.strict) for tool in required.tools] == [("f", True), ("g", False)]
    assert required.tools[0].parameters == SCHEMA
    assert required.tools[1].parameters["additionalProperties"] is False, "no parameters at all"
    named = {"type": "function", "function": {"name": "g"}}
    assert build(tools=[TOOL, other], tool_choice=named).wanted_output == ToolCallOutput(
        required.tools[1:]
    )


JSON = "response_format: json_schema: "
WRONG_TYPE = "tools: a tool of type"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {}}, "response_format: type None is not one of"),
        ({"response_format": {"type": "xml"}}, "response_format: type 'xml' is not one of text"),
        ({"response_format": {"type": "text", "a": 1}}, "response_format: 'a' is not known"),
        (
            {"response_format": {"type": "grammar", "grammar": "root ::= x"}},
            "response_format: the grammar is in GBNF or EBNF (`::=`), but Lark is needed",
        ),
        ({"response_format": {"type": "json_schema"}}, JSON + "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            JSON + "schema must be an object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shema": SCHEMA}}},
            JSON + "'shema' is not known; known are ",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": SCHEMA, "strict": 1},
                }
            },
            JSON + "strict must be true, false or null, not 1",
        ),
        *(
            ({"response_format": {"type": kind, **given}}, f"response_format: {kind} must be")
            for kind, given in [
                ("regex", {}),
                ("regex", {"regex": 3}),
                ("regex", {"regex": ""}),
                ("choice", {}),
                ("choice", {"choice": "a"}),
                ("choice", {"choice": []}),
                ("choice", {"choice": ["a", 3]}),
                ("choice", {"choice": ["a", ""]}),
                ("choice", {"choice": ["a"] * 1001}),
            ]
        ),
        ({"response_format": {"type": []}}, "response_format: type [] is not one of"),
        ({"response_format": {"type": "regex", "choice": []}}, "response_format: 'choice' is not"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice: needs tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice: 'sometimes' is not one of"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice: {'type'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice: names the function 'x', which is not among the tools",
        ),
        ({"tools": [{"name": "f"}], "tool_choice": "required"}, "tools: each must be like"),
        *(
            (
                {
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": given}}],
                    "tool_choice": "required",
                },
                f"tools: the parameters of 'f' must {right}",
            )
            for given, right in (
                ({"type": "array"}, "have the type 'object', got 'array'"),
                ({"type": None}, "have the type 'object', got None"),
                ([], "be an object, a JSON schema"),
            )
        ),
        *(
            ({"tools": [TOOL, tool], "tool_choice": choice}, message)
            for choice in (None, "none", "auto", "required")
            for tool, message in [
                ({"type": "web_search_preview_2025_03_11"}, f"{WRONG_TYPE} 'web_search_preview_2"),
                ({"type": "custom", "custom": {"name": "f"}}, f"{WRONG_TYPE} 'custom' is not"),
                ({**TOOL, "type": None}, f"{WRONG_TYPE} 'None' is not"),
                ({**TOOL, "type": ["function"]}, f"{WRONG_TYPE} \"['function']\" is not"),
                ({"type": "function", "name": "f", "parameters": {}}, "tools: each must be like"),
                ({"type": "function", "function": {"name": 3}}, "tools: a function has no name"),
            ]
        ),
        (
            {"tools": [{"type": "function", "function": {}}], "tool_choice": "required"},
            "tools: a function has no name",
        ),
        *(
            ({"tools": [MANY_PARAMETERS] * 2, "tool_choice": choice}, "tools: 16386 parameters are")
            for choice in (None, "none", "auto", "required")
        ),
    ],
)
def test_what_is_not_well_formed_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(**fields)
    assert str(caught.value).startswith(message)
    assert caught.value.field == message.split(":")[0]


def test_a_call_that_is_required_does_not_follow_the_response_format() -> None:
    fields = {"tools": [TOOL], "response_format": {"type": "json_object"}}
    assert isinstance(build(**fields, tool_choice="required").wanted_output, ToolCallOutput)
    assert isinstance(build(**fields, tool_choice="auto").wanted_output, JsonOutput)


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_tool_without_parameters_takes_no_arguments(parameters: dict[str, Any] | None) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    wanted = build(tools=[tool], tool_choice="required").wanted_output
    assert isinstance(wanted, ToolCallOutput)
    assert wanted.tools[0].parameters == NO_ARGUMENTS


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_no_tools_need_no_choice(choice: str) -> None:
    assert build(tools=[], tool_choice=choice).wanted_output is None
