"""Calls, reasoning and content in the formats of newer families, from the template and back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from promptq.producer.calls.output.model_text import ExpectedOutput, ModelText, Piece, read_whole
from promptq.producer.calls.output.output_text import OutputText
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.output_style import CHANNELS, ELEMENTS, LITERALS, TAGGED, OutputStyle
from promptq.shared.protocol.request import Request
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.model_identity import identify
from promptq.worker.text.output_marks import OutputMarks
from promptq.worker.text.output_styles import output_style, style_of
from promptq.worker.text.template_fields import with_fields_of
from tests.worker.text.formats import ARGUMENTS, FORMATS, TEXTS, TOOLS, USER, Format

EXPECTED = ExpectedOutput.of({"tools": TOOLS})
FORCED = ExpectedOutput.of({"tools": TOOLS, "tool_choice": "required"})
BY_NAME = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


def call(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read(
    text: str, style: OutputStyle, expected: ExpectedOutput = EXPECTED, *, longest_cut: int = 80
) -> tuple[Any, ...]:
    """Reasoning, content and calls of a text, which are the same wherever it is cut."""
    whole = read_whole(text, style, expected)
    for cut in range(len(text) if len(text) <= longest_cut else 0):
        reader = ModelText(style, expected)
        assert reader.feed(text[:cut]) + reader.feed(text[cut:]) + reader.finish() == whole, cut
    reader, pieces = ModelText(style, expected), Piece()
    for letter in text:
        pieces += reader.feed(letter)
        assert whole.content.startswith(pieces.content), "what was streamed stays"
    assert pieces + reader.finish() == whole
    parts = OutputText(style, expected)
    joined: dict[str, str] = {}
    for part in [part for letter in text for part in parts.feed(letter)] + parts.finish():
        joined[part.kind] = joined.get(part.kind, "") + (part.name or "") + part.text
    assert joined.get("reasoning", "") == whole.reasoning
    assert joined.get("content", "") == whole.content
    assert joined.get("call", "") == "".join(f"{it.name}{it.arguments}" for it in whole.calls)
    calls = [(it.name, json.loads(it.arguments)) for it in whole.calls]
    return whole.reasoning, whole.content.strip(), calls


def messages_of(format: Format) -> Iterator[dict[str, Any]]:
    """Content, reasoning and calls, alone and together."""
    arguments = {name: value for name, value in ARGUMENTS.items() if name not in format.drops}
    text = {"content": "Let me see." if format.text_before_call else ""}
    reasoning = {"reasoning_content": "Hm, <tool_call>.\n\nSo."} if format.has_reasoning else {}
    first, second = call("get_weather", arguments), call("stop_all", {}, "call_2")
    yield {"content": "Yes [1], <b>bold</b>: {} (a=1)."}
    yield {"content": "", "tool_calls": [first]}
    yield {"content": "", "tool_calls": [second]}
    yield {**text, "tool_calls": [first, second][: format.most_calls]}
    yield {**text, **reasoning, "tool_calls": [second, first, second][: format.most_calls]}
    if format.style.form != CHANNELS:  # the template drops the reasoning of a message without calls
        yield {"content": "Yes.", **reasoning}


def output_of(format: Format, message: dict[str, Any]) -> str:
    """The text of an output, as a worker publishes it, that the template renders so."""
    tokenizer = format.tokenizer()
    written = format.written(message)
    request = Request.build({"messages": [USER], "tools": TOOLS})
    prompt = tokenizer.encode_prompt(request)
    marks = OutputMarks(tokenizer, format.style, request, prompt)
    stream, _ = marks.text_stream([], [], 0)
    tokens = tokenizer.encode_text(written)
    return "".join(map(stream.push, tokens)) + stream.flush()


@BY_NAME
def test_a_message_is_read_back_as_the_template_renders_it(format: Format) -> None:
    for message in messages_of(format):
        text = output_of(format, message)
        reasoning, content, calls = read(text, format.style, longest_cut=400)
        assert reasoning == message.get("reasoning_content", "").strip(), text
        assert content == message["content"], text
        wanted = [it["function"] for it in message.get("tool_calls", [])]
        assert calls == [(it["name"], it["arguments"]) for it in wanted], text


@BY_NAME
def test_any_text_and_value_in_arguments_is_read_back(format: Format, seed: int) -> None:
    """Marks of the format among them. The mark right behind a text ends it, which none can hold."""
    rng = random.Random(seed)
    style = format.style
    texts = [*TEXTS, *format.marks, *style.call_marks[:2], "".join(style.reasoning_marks)]
    ends = {style.value_after.strip(), style.quote} - {""}
    for text in texts:
        if any(end in text for end in ends) or ("name" in format.drops and not text.isalnum()):
            continue
        arguments = {"name": text}
        if "place" not in format.drops:
            x = {"k": [rng.choice([0, -1.5, 10**20, True, None, "", "ü"]), {}, [[]], {"y": "5"}]}
            arguments["place"] = {"tags": [text, "a"], "x": x if style.form == LITERALS else text}
        for name in ("get_weather", "stop_all"):
            message = {"content": "", "tool_calls": [call(name, arguments)]}
            if name == "stop_all" and style.form in (ELEMENTS, TAGGED):
                continue  # without a schema, 5 is a number
            written = output_of(format, message)
            assert read(written, style)[2] == [(name, arguments)], written


@BY_NAME
def test_a_family_is_recognised_by_its_template_and_has_a_name(format: Format) -> None:
    by_name = output_style("", name=format.name)
    assert by_name.call_marks == format.style.call_marks
    assert by_name.form == format.style.form
    hermes = '<tool_call>{"name": 1}</tool_call></think>'
    named = output_style(hermes, name=format.name)
    assert named.call_marks == format.style.call_marks
    with pytest.raises(ConfigurationError, match=r"^--output-style: 'gpt-os' is not known; known"):
        output_style("", name="gpt-os")
    assert style_of(format.tokenizer(), "hermes").after == "\n</tool_call>"


@BY_NAME
def test_a_text_that_is_cut_has_no_whole_mark_in_its_reasoning_or_arguments(
    format: Format,
) -> None:
    message = list(messages_of(format))[4]
    text = output_of(format, message)
    whole = read_whole(text, format.style, EXPECTED)
    for end in range(0, len(text), 3):
        cut = read_whole(text[:end], format.style, EXPECTED)
        assert len(cut.calls) <= len(whole.calls)
        for some, all_of_it in zip(cut.calls, whole.calls, strict=False):
            assert some.name == all_of_it.name
            if format.style.form not in (ELEMENTS, TAGGED):
                assert all_of_it.arguments.startswith(some.arguments)
        if format.style.form == CHANNELS:
            assert not any(mark in cut.content for mark in format.style.call_marks)


def test_a_setting_names_the_family() -> None:
    style = identify(WorkerSettings(output_style="glm-4.7")).output_style
    assert style is not None
    assert style.call_marks == FORMATS["glm-4.7"].style.call_marks
    with pytest.raises(ConfigurationError, match=r"^--output-style: 'glm' is not known; known are"):
        identify(WorkerSettings(output_style="glm"))


@pytest.mark.parametrize("expected", [EXPECTED, FORCED], ids=["free", "forced"])
@BY_NAME
def test_any_cut_of_any_text_gives_the_same(
    format: Format, expected: ExpectedOutput, seed: int
) -> None:
    rng = random.Random(seed)
    style = format.style
    parts = [*style.call_marks, *style.reasoning_marks, "get_weather", "name", "{}", '"', "\n"]
    parts += [" ", "abc", "{", "}", "[", "]", "(", ")", "=", ":", ",", "'", "\\", "None", "1.5"]
    for _ in range(60):
        chosen = rng.choices(parts, k=rng.randint(0, 14))
        text = "".join(part[: rng.choice([99, 99, rng.randint(0, 40)])] for part in chosen)
        reader, whole = ModelText(style, expected), Piece()
        at = 0
        for cut in sorted(rng.choices(range(len(text) + 1), k=8)):
            whole += reader.feed(text[at:cut])
            at = cut
        whole += reader.feed(text[at:]) + reader.finish()
        assert whole == read_whole(text, style, expected), text


# gpt-oss


def in_channels(text: str, **fields: Any) -> tuple[Any, ...]:
    return read(text, FORMATS["gpt-oss"].style, ExpectedOutput.of(fields))


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes."),
        (f"{ANALYSIS}\n<|start|>assistant<|channel|>final<|message|>Yes.<|end|>", "Hm.", "Yes."),
        ("<|channel|>final<|message|>Yes.", "", "Yes."),
        (ANALYSIS + "<|start|>assistant" + ANALYSIS, "Hm.\nHm.", ""),
        ("<|channel|>commentary<|message|>I look.<|end|>" + ANALYSIS, "Hm.", "I look."),
        ("<|channel|>commentary to=assistant<|message|>Yes.", "", "Yes."),
        ("<|channel|>analysis<|message|>Hm", "Hm", ""),
        ("<|channel|>analysis", "", ""),
        (ANALYSIS + "<|start|>assistant<|chan", "Hm.", ""),
        (" Yes.", "", "Yes."),
        ('{"a": 1}', "", '{"a": 1}'),
        ("", "", ""),
    ],
)
def test_the_messages_of_a_text_are_reasoning_and_content(
    text: str, reasoning: str, content: str, tools: Any
) -> None:
    assert in_channels(text, tools=tools) == (reasoning, content, [])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>analysis to=functions.f code",
        " to=functions.f<|channel|>commentary json",
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json",
    ],
)
def test_a_recipient_may_stand_on_either_side_of_the_channel(header: str) -> None:
    text = f'{header}<|message|>{{"a": "<|x|>"}}<|call|>'
    assert in_channels(text, tools=TOOLS)[2] == [("f", {"a": "<|x|>"})]
    both = in_channels(f"{ANALYSIS}<|start|>assistant{text}<|start|>assistant{text}", tools=TOOLS)
    assert both == ("Hm.", "", [("f", {"a": "<|x|>"})] * 2)
    forced = read(text, FORMATS["gpt-oss"].style, FORCED)
    assert forced == ("", "", [("f", {"a": "<|x|>"})])
    no_arguments = f"{header}<|message|><|call|>"
    assert in_channels(no_arguments, tools=TOOLS)[2] == [("f", {})]


def test_channels_are_read_without_tools_and_counted_but_not_where_a_schema_binds() -> None:
    tokenizer, style = FORMATS["gpt-oss"].tokenizer(), FORMATS["gpt-oss"].style
    text = f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Yes."
    tokens = tokenizer.encode_text(text)
    num_reasoning = len(tokenizer.encode_text("Hm."))
    as_json: Any = {"response_format": {"type": "json_object"}}
    for fields, shown in (({}, text), ({"tools": TOOLS, "tool_choice": "none"}, text)):
        request = Request.build({"messages": [USER], **fields})
        marks = OutputMarks(tokenizer, style, request, tokenizer.encode_prompt(request))
        stream, _ = marks.text_stream([], [], 0)
        assert "".join(map(stream.push, tokens)) + stream.flush() == shown
        counter = marks.reasoning_tokens(frozenset())
        assert counter is not None
        assert counter.count(tokens, text) == num_reasoning
        assert counter.count(tokens * 2, text * 2) is None, "it counts one message alone"
    request = Request.build({"messages": [USER], **as_json})
    marks = OutputMarks(tokenizer, style, request, tokenizer.encode_prompt(request))
    assert marks.reasoning_tokens(frozenset()) is None
    assert in_channels('{"a": 1}', **as_json)[1] == '{"a": 1}'


def test_reasoning_of_a_mark_with_a_word_is_counted() -> None:
    format = FORMATS["gemma-4"]
    tokenizer = format.tokenizer()
    text = "<|channel>thought\nHm, so.<channel|>Yes."
    request = Request.build({"messages": [USER]})
    marks = OutputMarks(tokenizer, format.style, request, tokenizer.encode_prompt(request))
    counter = marks.reasoning_tokens(frozenset())
    assert counter is not None
    tokens = tokenizer.encode_text(text)
    assert counter.count(tokens, text) == len(tokenizer.encode_text("Hm, so."))
    assert counter.count(tokenizer.encode_text("Yes."), "Yes.") == 0


# Texts that look like calls of Python


@pytest.mark.parametrize(
    "text",
    [
        "[1] says so.", "[link](http://a.b/c)", "[note (s)]", "[f]", "[f(1)]", "[f(a)]", "[f(", "[",
        "[f x(a=1)]", "See [f(a=1)].", "[]", "[f(a b=1)]",
    ],
)  # fmt: skip
def test_a_text_in_brackets_is_content(text: str) -> None:
    assert read_whole(text, FORMATS["pythonic"].style, EXPECTED) == Piece("", text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f()", {}),
        ("f( a = 'x', b=\"y'\" )", {"a": "x", "b": "y'"}),
        (r"f(a='it\'s', b='\n\t\x41\u00e9\U0001F98A\ud83e\udd8a\q\u12')",
         {"a": "it's", "b": "\n\tAé🦊🦊\\q\\u12"}),
        ("f(a=[1, -2.5, 1., 1e5, True, None], b={'k': [], \"l\": {'m': ()}})",
         {"a": [1, -2.5, 1.0, 1e5, True, None], "b": {"k": [], "l": {"m": "()"}}}),
        ("f(a=true, b=null, c=[], d={}, e='')", {"a": True, "b": None, "c": [], "d": {}, "e": ""}),
        ("f(a='x)], g(b=1)')", {"a": "x)], g(b=1)"}),
        ("f(a=, b={'k': , 'l': [,]}, c=)", {"a": None, "b": {"k": None, "l": []}, "c": None}),
    ],
)  # fmt: skip
def test_literals_of_python(text: str, arguments: Any) -> None:
    style = FORMATS["pythonic"].style
    assert read(f"[{text}]", style)[2] == [("f", arguments)]
    assert read(f"<|python_start|>[{text},{text}]", style)[2] == [("f", arguments)] * 2


def test_bare_literals_have_the_types_of_the_schema() -> None:
    style = FORMATS["gemma-4"].style
    text = "<|tool_call>call:get_weather{name:12,count:null,share:1.,x:nil}<tool_call|>"
    assert read(text, style)[2] == [
        ("get_weather", {"name": "12", "count": "null", "share": 1.0, "x": None})
    ]


# Compatibility


def test_styles_and_forced_calls_of_earlier_releases_are_read() -> None:
    """Their tags have no line breaks, and they force calls as objects."""
    earlier = OutputStyle(
        form=TAGGED, opening="<tool_call>\n<function=", middle=">", key_before="<parameter=",
        key_after=">", value_after="</parameter>", closing="</function>\n</tool_call>",
    )  # fmt: skip
    message = {"content": "", "tool_calls": [call("get_weather", ARGUMENTS)]}
    text = output_of(FORMATS["qwen3-coder"], message)
    assert read(text.split("</think>")[1], earlier)[2] == [("get_weather", ARGUMENTS)]
    as_object = '\n{"name": "stop-all", "arguments": {"a": "}"}}'
    for format in FORMATS.values():
        if format.style.has_pairs or format.style.form == CHANNELS:
            assert read(as_object, format.style, FORCED) == ("", "", [("stop-all", {"a": "}"})])


# What a template reads


def test_ids_of_calls_are_those_that_the_template_reads() -> None:
    first, second = call("f", {}, "call_x"), call("g", {}, "call_y")
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [first, second]},
        {"role": "tool", "content": "1", "tool_call_id": "call_y"},
        {"role": "tool", "content": "2", "tool_call_id": "call_x"},
        {"role": "assistant", "content": "", "tool_calls": [first]},
        {"role": "tool", "content": "3", "tool_call_id": "call_x"},
        {"role": "tool", "content": "4", "tool_call_id": "unknown"},
    ]

    def ids(template: str) -> list[str]:
        found = []
        for message in with_fields_of(template, chat):
            found += [it["id"] for it in message.get("tool_calls", [])]
            found += [message["tool_call_id"]] if "tool_call_id" in message else []
        return found

    kimi = ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0"]
    kimi += ["functions.f:2", "functions.f:2", "unknown"]
    assert ids(FORMATS["kimi-k2"].template) == kimi
    mistral = ids(FORMATS["mistral-numbered"].template)
    assert [mistral.index(it) for it in mistral] == [0, 1, 1, 0, 4, 4, 6]
    assert all(len(it) == 9 and it.isalnum() for it in mistral[:-1])
    assert ids("") == ["call_x", "call_y", "call_y", "call_x", "call_x", "call_x", "unknown"]
    kept = call("f", {}, "a1B2c3D4e")
    [message] = with_fields_of("[TOOL_CALLS]", [{"role": "assistant", "tool_calls": [kept]}])
    assert message["tool_calls"] == [kept]
    assert chat[0]["tool_calls"][0]["id"] == "call_x", "the request does not change"


def test_the_reasoning_of_gpt_oss_is_in_the_field_that_its_template_reads() -> None:
    template = FORMATS["gpt-oss"].template
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert with_fields_of(template, [message]) == [{**message, "thinking": "Hm."}]
    assert with_fields_of("", [message]) == [message]
    both = {**message, "content": "I look.", "tool_calls": [call("f", {})]}
    assert with_fields_of(template, [both]) == [both], "the template refuses both"


@pytest.mark.parametrize("template", ["<|tool_call_argument_begin|>", "[TOOL_CALLS]"])
def test_calls_without_ids_change_no_other_message(template: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "Hi"}]
    assert with_fields_of(template, messages)[1] == messages[1]
