"""Forced calls in the formats of newer families: what their grammars accept, and what is read."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from promptq.producer.calls.output.model_text import ExpectedOutput, read_whole
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_style import CHANNELS, LITERALS, NAMED
from promptq.shared.protocol.request import Request
from promptq.worker.engine.api.grammar import Grammar
from promptq.worker.engine.api.messages import EngineAbilities
from promptq.worker.leases.prepare_or_resume import Preparation
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.output_marks import OutputMarks
from tests.worker.leases.world import Bounds, claim, limits
from tests.worker.text.formats import ARGUMENTS, FORMATS, PROPERTIES, SCHEMA, USER, Format
from tests.worker.text.grammars.test_grammars import END, walk

BY_NAME = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
PAIRS = [it for it in FORMATS.values() if it.style.has_pairs]
TAGS = [it for it in PAIRS if it.style.form != LITERALS]
OF_TAGS = pytest.mark.parametrize("format", TAGS, ids=[it.name for it in TAGS])
OF_PAIRS = pytest.mark.parametrize("format", PAIRS, ids=[it.name for it in PAIRS])


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def forced(format: Format, *tools: Any) -> Request:
    return Request.build({"messages": [USER], "tools": list(tools), "tool_choice": "required"})


@cache
def grammars_of(format: Format) -> Grammars:
    tokenizer = format.tokenizer()
    call_end = tokenizer.special_tokens.get("<|call|>", END)
    return Grammars(tokenizer, tokenizer.num_tokens, frozenset({END, call_end}))


def grammar_of(format: Format, request: Request) -> Grammar:
    assert request.wanted_output is not None
    return grammars_of(format).start(request.wanted_output, frozenset({END}))


def is_accepted(format: Format, request: Request, text: str) -> bool:
    grammar: Any = grammar_of(format, request)
    tokens = format.tokenizer().encode_text(text)
    if grammar.matcher.validate_tokens(tokens) < len(tokens):
        return False
    for token_id in tokens:
        grammar.accept(token_id)
    return bool(grammar.matcher.is_accepting())


def written(format: Format, name: str, arguments: Any) -> str:
    """A call as the template renders it behind a prompt."""
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    text = format.written({"content": "", "reasoning_content": "", "tool_calls": [call]})
    for mark in ("<think>", "</think>", "<|python_start|>", "<|python_end|>"):
        text = text.replace(mark, "")
    return text.strip("\n").removesuffix("<|call|>")


def arguments_of(format: Format) -> Any:
    if format.name == "pythonic":  # whose template writes all values as texts
        return {"mode": "slow", "name": "Paris"}
    return ARGUMENTS


def read_forced(format: Format, request: Request, seed: int) -> tuple[str, Any]:
    """The call in a random output that the grammar allows, as a gateway reads it."""
    tokenizer = format.tokenizer()
    tokens = walk(grammar_of(format, request), seed, tokenizer.num_tokens)
    marks = OutputMarks(tokenizer, format.style, request, tokenizer.encode_prompt(request))
    stream, _ = marks.text_stream([], [], 0)
    text = "".join(map(stream.push, tokens)) + stream.flush()
    fields = {"tools": request.tools, "tool_choice": "required"}
    read = read_whole(text, format.style, ExpectedOutput.of(fields))
    assert read.content == "", text
    [call] = read.calls
    return call.name or "", json.loads(call.arguments)


@BY_NAME
def test_a_forced_call_may_be_what_the_template_renders(format: Format) -> None:
    request = forced(format, tool("get_weather", SCHEMA), tool("stop_all"))
    for name, arguments in (("get_weather", arguments_of(format)), ("stop_all", {})):
        text = written(format, name, arguments)
        assert name in text
        assert is_accepted(format, request, text), text
        for other in (text + "x", "x" + text, text[:-1], text.replace(name, name + "s"), "Yes."):
            assert not is_accepted(format, request, other), other


@BY_NAME
def test_a_forced_call_may_not_have_arguments_that_its_schema_refuses(format: Format) -> None:
    request = forced(format, tool("get_weather", SCHEMA), tool("stop_all"))
    for name, arguments in (
        ("get_weather", {"mode": "slow"}),  # without a name
        ("get_weather", {"name": "Paris", "other": "a"}),
        ("get_weather", {"mode": "medium", "name": "Paris"}),
        ("stop_all", {"name": "Paris"}),
    ):
        assert not is_accepted(format, request, written(format, name, arguments))
    if format.name != "pythonic":
        for property in ({"count": 1.5}, {"days": ["a"]}, {"flag": 0}, {"none": False}):
            text = written(format, "get_weather", {**property, "name": "Paris"})
            assert not is_accepted(format, request, text), text


NAMES = [
    *("get-weather", "a.b", "my tool", "a:b", "a/b", "f(x)", "a>b", "a<b", 'say "hi"', "{x}", "x]"),
    *("[ARGS]", "é1", " f", "5", "x" * 150, "<tool_call>", "=", "'a'", "\\"),
]


@BY_NAME
def test_a_call_of_any_name_is_read_back_or_refused(format: Format, seed: int) -> None:
    """Names that a form cannot hold are written as JSON, if a reader of the form expects that."""
    refused = {}
    for name in NAMES:
        request = forced(format, tool(name, {"type": "object", "properties": {}}))
        try:
            assert read_forced(format, request, seed) == (name, {})
        except InvalidRequestError as error:
            refused[name] = str(error)
    is_quoted = format.style.form not in (NAMED, CHANNELS)
    assert refused == {} if is_quoted else {"a:b", "a<b"} & refused.keys()
    assert "get-weather" not in refused
    for name, said in refused.items():
        assert f"calls cannot name a tool {name!r}"[:100] in said


ADDRESS: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
    },
    "required": ["city"],
}
SCHEMAS: dict[str, Any] = {
    "optional": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "b": {"type": "integer", "minimum": 0, "maximum": 12},
            "c": {"type": "boolean"},
        },
    },
    "mixed": {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"], "maxLength": 4},
            "b": {"enum": ["x", "yy", 3, None]},
            "c": {"const": "fox"},
            "d": {"anyOf": [{"type": "boolean"}, {"enum": ["auto"]}]},
        },
        "required": ["a", "b", "d"],
    },
    "references": {
        "type": "object",
        "properties": {
            "from": {"$ref": "#/$defs/address"},
            "kind": {"$ref": "#/$defs/kind"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/kind"}, "maxItems": 2},
        },
        "required": ["from"],
        "$defs": {"address": ADDRESS, "kind": {"type": "string", "enum": ["1", "true"]}},
    },
    "lists": {
        "type": "object",
        "properties": {
            "some": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3},
            "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        },
        "required": ["some", "pair"],
    },
    "open": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    # These are more than most forms can hold.
    "pattern": {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[ab]{2}$"}},
        "required": ["a"],
    },
    "combined": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"enum": [2]}}, "required": ["b"]},
        ],
        "type": "object",
    },
    "key": {"type": "object", "properties": {'a">b</x>=': {"enum": [1]}}},
}


@pytest.mark.matrix(52)
@pytest.mark.parametrize("name", SCHEMAS)
@BY_NAME
def test_what_a_grammar_allows_is_read_as_what_the_schema_allows(
    format: Format, name: str, seed: int
) -> None:
    schema = SCHEMAS[name]
    for each in range(2):
        called, arguments = read_forced(format, forced(format, tool("f", schema)), seed + each)
        assert called == "f"
        jsonschema.validate(arguments, schema)


@OF_PAIRS
def test_a_call_is_an_object_if_the_form_cannot_hold_its_schema(format: Format) -> None:
    fits, too_much = tool("f", SCHEMAS["optional"]), tool("g", SCHEMAS["combined"])
    request = forced(format, fits, too_much)
    assert is_accepted(format, request, '{"name": "g", "arguments": {"a": 1}}')
    assert not is_accepted(format, request, '{"name": "g", "arguments": {"a": 2}}')
    assert not is_accepted(format, request, '{"name": "f", "arguments": {}}')
    assert is_accepted(format, request, written(format, "f", {"a": "x"}))


@OF_PAIRS
def test_a_malformed_schema_is_refused_with_the_reason(format: Format) -> None:
    malformed = tool("f", {"type": "object", "required": [{}]})
    with pytest.raises(InvalidRequestError, match="Expected string for 'required'"):
        grammar_of(format, forced(format, malformed))


@OF_PAIRS
def test_no_text_is_read_as_a_value_that_the_schema_refuses(format: Format) -> None:
    """Without a mark that says so, 5 between tags may be a number and a text."""
    mixed = {"type": ["string", "integer"], "minimum": 10}
    request = forced(format, tool("f", {"type": "object", "properties": {"a": mixed}}))
    refused = "[f(a=5)]" if format.name == "pythonic" else written(format, "f", {"a": 5})
    assert not is_accepted(format, request, refused)
    as_object = '{"name": "f", "arguments": {"a": "5"}}'
    has_texts_apart = format.style.form == LITERALS and not format.style.quote
    has_texts_apart |= bool(format.style.key_after_json)
    assert is_accepted(format, request, as_object) != has_texts_apart
    if format.style.key_after_json:
        assert is_accepted(format, request, written(format, "f", {"a": "5"}))
        assert is_accepted(format, request, written(format, "f", {"a": 12}))


@OF_PAIRS
def test_a_text_that_is_no_json_may_stand_beside_other_values(format: Format) -> None:
    """Clients' libraries write a choice that may be missing in this way."""
    for words, fits in ((["fast", "slow"], True), (["1", "slow"], False)):
        mode = {"anyOf": [{"type": "string", "enum": words}, {"type": "integer"}]}
        request = forced(format, tool("f", {"type": "object", "properties": {"a": mode}}))
        fits |= format.style.form == LITERALS or bool(format.style.key_after_json)
        assert is_accepted(format, request, written(format, "f", {"a": "slow"})) == fits
        assert not is_accepted(format, request, written(format, "f", {"a": "slower"}))
        if format.name != "pythonic":
            assert is_accepted(format, request, written(format, "f", {"a": 12})) == fits
        as_object = '{"name": "f", "arguments": {"a": "slow"}}'
        assert is_accepted(format, request, as_object) != fits


@BY_NAME
def test_other_arguments_do_not_repeat_a_property(format: Format) -> None:
    schema = {**SCHEMAS["open"], "properties": {"ab": {"type": "string"}}}
    schema["additionalProperties"] = {"type": "string"}
    request = forced(format, tool("f", schema))
    pair = written(format, "f", {"ab": "x", "abc": "y"})
    assert is_accepted(format, request, pair)
    assert not is_accepted(format, request, pair.replace("abc", "ab"))


@OF_PAIRS
def test_a_text_ends_at_the_first_mark_behind_it(format: Format) -> None:
    """Letters that only begin the mark belong to the text."""
    request = forced(
        format, tool("f", {"type": "object", "properties": {"name": {"type": "string"}}})
    )
    end = format.style.value_after.strip() or format.style.quote
    for text in ("a" + end[:-1], end[:2], "\n", "\n\n", "<", '"', "ü🦊", ""):
        if (format.name == "pythonic" and not text.isprintable()) or ('"' in text and not end):
            continue  # the template does not escape them
        if any(token in text for token in format.added):
            continue  # no text has them
        assert is_accepted(format, request, written(format, "f", {"name": text})), text


@BY_NAME
def test_a_call_of_no_schema_may_have_any_arguments(format: Format) -> None:
    request = forced(format, tool("f", {"type": "object", "additionalProperties": True}))
    for arguments in ({}, {"a": "x"}, {"a": "x", "b": "y"}):
        assert is_accepted(format, request, written(format, "f", arguments))
    if format.style.form == LITERALS and format.style.quote:
        nested = {"a": {"k": [None, True, -1.5, {"l": "x", "m": []}]}}
        assert is_accepted(format, request, written(format, "f", nested))


def test_words_of_python_are_constants_where_templates_write_them() -> None:
    schema = {"type": "object", "properties": {name: PROPERTIES[name] for name in ("flag", "none")}}
    tags = "<tool_call>\n<function=f>\n<parameter=flag>\nTrue\n</parameter>\n<parameter=none>\nNone"
    tags += "\n</parameter>\n</function>\n</tool_call>"
    for name, text in (("qwen3-coder", tags), ("pythonic", "[f(flag=True, none=None)]")):
        format = FORMATS[name]
        request = forced(format, tool("f", schema))
        assert is_accepted(format, request, text)
        assert not is_accepted(format, request, text.replace("True", "Yes"))


def test_a_call_of_gpt_oss_has_its_recipient_on_either_side() -> None:
    format = FORMATS["gpt-oss"]
    assert format.style.form == CHANNELS
    request = forced(format, tool("f", SCHEMAS["optional"]))
    for header in (
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
    ):
        assert is_accepted(format, request, header + '<|message|>{"b": 3}')
        assert not is_accepted(format, request, header + '<|message|>{"b": 13}')
    assert not is_accepted(format, request, '<|channel|>final<|message|>{"b": 3}')


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("qwen3-coder", '{"name": "f", "arguments": {"b": 3}}'),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f"
         '<|tool_call_argument_begin|>{"b": 3}<|tool_call_end|><|tool_calls_section_end|>'),
        ("mistral-numbered", '[TOOL_CALLS]f[ARGS]{"b": 3}'),
    ],
)  # fmt: skip
def test_a_call_that_an_earlier_release_began_goes_on_in_its_form(name: str, begun: str) -> None:
    format = FORMATS[name]
    tokenizer = format.tokenizer()
    tokens = tokenizer.encode_text(begun)
    prepares = Preparation(
        tokenizer,
        Bounds(limits(vocab_size=tokenizer.num_tokens), EngineAbilities(grammars=True)),
        ModelIdentity(name, name, format.style),
        frozenset({END}),
        grammars_of(format),
    )
    fields: dict[str, Any] = {"messages": [USER], "tools": [tool("f", SCHEMAS["optional"])]}

    def grammar_behind(token_ids: list[int]) -> Grammar:
        events = [TokenEvent(index=0, token_ids=token_ids, text="")]
        held = prepares.prepare(claim(events, **fields, tool_choice="required", prompt=None))
        assert held.engine_request.grammar is not None
        return held.engine_request.grammar

    grammar = grammar_behind(tokens[:-2])
    for token_id in tokens[-2:]:
        assert not grammar.is_complete
        grammar.accept(token_id)
    assert grammar.is_complete
    with pytest.raises(InvalidRequestError, match="the output of earlier attempts does not fit"):
        grammar_behind([*tokens, tokens[0]])


@OF_TAGS
def test_a_text_beside_other_types_keeps_its_pattern(format: Format) -> None:
    mixed = {"type": ["string", "null"], "pattern": "^[0-9]{5}$"}
    request = forced(format, tool("f", {"properties": {"a": mixed}, "required": ["a"]}))
    for text, is_right in (("12345", True), ("x", False)):
        as_object = json.dumps({"name": "f", "arguments": {"a": text}})
        assert is_accepted(format, request, as_object) == is_right
        assert not is_accepted(format, request, written(format, "f", {"a": text}))


@OF_TAGS
@pytest.mark.parametrize("kind", ["itself", "doubled", "copied"])
def test_a_schema_of_many_branches_or_references_makes_an_object(format: Format, kind: str) -> None:
    """Each takes little time and memory, as the form of the family would not."""
    definitions: dict[str, Any] = {
        "itself": {"anyOf": [{"$ref": "#/$defs/itself"}, {"type": "null"}]},
        "doubled": {"$ref": "#/$defs/d0"},
        **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(12)},
        "d12": {"type": "integer"},
        "copied": {"type": "array", "items": {"$ref": "#/$defs/d12"}, "minItems": 1},
    }
    names = [f"p{n}" for n in range(400 if kind == "copied" else 1)]
    properties = {name: {"$ref": f"#/$defs/{kind}"} for name in names}
    parameters = {"properties": properties, "required": names, "$defs": definitions}
    value = {"itself": None, "doubled": 7, "copied": [7]}[kind]
    arguments = json.dumps(dict.fromkeys(names, value))
    request = forced(format, tool("f", parameters))
    assert is_accepted(format, request, f'{{"name": "f", "arguments": {arguments}}}')
