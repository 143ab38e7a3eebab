"""Marks of calls and reasoning are in the text of a chat, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import Request
from promptq.worker.text.detokenizer import TextStream
from promptq.worker.text.output_marks import OutputMarks
from promptq.worker.text.output_styles import output_style, style_of
from promptq.worker.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from tests.worker.text.families import FAMILIES, TOOLS, Family

CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED = FAMILIES["Mistral, named"]


def marks_of(tokenizer: HuggingFaceTokenizer, **fields: Any) -> OutputMarks:
    """Of a request with these fields, as a worker prepares it."""
    request = Request.build(fields)
    return OutputMarks(tokenizer, style_of(tokenizer), request, tokenizer.encode_prompt(request))


def stream_of(
    tokenizer: HuggingFaceTokenizer, token_ids: list[int], text: str, **fields: Any
) -> TextStream:
    """The text behind what an earlier attempt emitted."""
    event = TokenEvent(index=0, token_ids=token_ids, text=text)
    stream, _ = marks_of(tokenizer, **fields).text_stream([], [event] if token_ids else [], 0)
    return stream


def output_of(tokenizer: HuggingFaceTokenizer, text: str, **fields: Any) -> str:
    """The text of an output in these tokens. A resumed one goes on with the same text."""
    token_ids = tokenizer.encode_text(text)
    stream = stream_of(tokenizer, [], "", **fields)
    pieces = [stream.push(token_id) for token_id in token_ids]
    for at in (0, 1, len(token_ids) // 2, len(token_ids)):
        resumed = stream_of(tokenizer, token_ids[:at], "".join(pieces[:at]), **fields)
        assert [resumed.push(token_id) for token_id in token_ids[at:]] == pieces[at:]
    return "".join(pieces) + stream.flush()


def without_special(family: Family, text: str) -> str:
    for mark in family.special:
        text = text.replace(mark, "")
    return text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_marks_of_calls_are_in_the_text_if_tools_are_shown(name: str) -> None:
    """They are special tokens in some families, and text in others."""
    family = FAMILIES[name]
    tokenizer, text = family.tokenizer(), family.content + family.calls
    assert all(len(tokenizer.encode_text(mark)) == 1 for mark in family.special)
    assert output_of(tokenizer, text, **CHAT, tools=TOOLS) == text
    hidden = without_special(family, text)
    assert output_of(tokenizer, text, **CHAT) == hidden
    assert output_of(tokenizer, text, **CHAT, tools=TOOLS, tool_choice="none") == hidden
    assert output_of(tokenizer, text, prompt="Hi") == hidden


def test_other_special_tokens_are_never_text() -> None:
    tokenizer = NAMED.tokenizer()
    text = "[THINK]a[/THINK]<|im_start|>b[TOOL_CALLS]c"
    assert "<|im_start|>" in tokenizer.special_tokens
    assert output_of(tokenizer, text, **CHAT) == "[THINK]a[/THINK]bc"
    assert output_of(tokenizer, text, **CHAT, tools=TOOLS) == text.replace("<|im_start|>", "")
    as_json = {"response_format": {"type": "json_object"}}
    assert output_of(tokenizer, text, **CHAT, **as_json) == "abc"


@pytest.mark.parametrize("prompt", ["<think>\n", "<think>", "{% if on %}<think>\n\n{% endif %}"])
def test_a_text_says_that_the_prompt_began_the_reasoning(prompt: str) -> None:
    tokenizer = Family("</think>").tokenizer(prompt)
    chat = {**CHAT, "chat_template_kwargs": {"on": True}}
    assert output_of(tokenizer, "Well.</think>Yes", **chat) == "<think>Well.</think>Yes"
    assert output_of(tokenizer, "é" * 3, **chat, stop="<think>") == "<think>ééé"
    for bound in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS}):
        more: Any = {**bound, "tool_choice": "required"} if "tools" in bound else bound
        assert output_of(tokenizer, "Well", **chat, **more) == "Well"
    assert output_of(tokenizer, "Well", prompt="<think>") == "Well"


def test_a_prompt_that_ended_the_reasoning_does_not_begin_it() -> None:
    tokenizer = Family("</think>").tokenizer("{% if off %}<think>\n\n</think>\n\n{% endif %}")
    off = {**CHAT, "chat_template_kwargs": {"off": True}}
    for chat in (CHAT, off, {"messages": [{"role": "user", "content": "<think>"}]}):
        assert output_of(tokenizer, "Yes", **chat) == "Yes"


def test_an_output_that_an_earlier_release_began_goes_on_as_it_was() -> None:
    """Its text has no marks."""
    tokenizer = NAMED.tokenizer("[THINK]")
    token_ids = tokenizer.encode_text("ab[/THINK]cd")
    stream = stream_of(tokenizer, token_ids[:4], "abc", **CHAT)
    assert stream.push(token_ids[4]) == "d"


@pytest.mark.parametrize(
    ("prompt", "text", "count"),
    [
        ("", "<think>a b c</think>d", 3),
        ("", "<think></think>d", 0),
        ("", "<think>a b c", 3),
        ("", "<think>a b c<|im_end|>", 3),
        ("", "a b c", 0),
        ("", "a<think>b</think>", 0),
        ("<think>", "a b c</think>d", 3),
        ("<think>", "a b c", 3),
        ("<think>", "", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(prompt: str, text: str, count: int) -> None:
    tokenizer = Family("</think>").tokenizer(prompt)
    token_ids = tokenizer.encode_text(text)
    ends = frozenset({tokenizer.special_tokens["<|im_end|>"]})
    marks = marks_of(tokenizer, **CHAT)
    whole = output_of(tokenizer, text, **CHAT)
    reasoning = marks.reasoning_tokens(ends)
    assert reasoning is not None
    assert reasoning.count(token_ids, whole) == count


def test_marks_that_are_spelt_in_letters_are_not_counted() -> None:
    tokenizer = Family("</think>").tokenizer("<think>")
    marks = marks_of(tokenizer, **CHAT)
    reasoning = marks.reasoning_tokens(frozenset())
    assert reasoning is not None
    spelt = [it for letter in "a</think>b" for it in tokenizer.encode_text(letter)]
    assert reasoning.count(spelt, "<think>a</think>b") is None
    bound = marks_of(tokenizer, **CHAT, response_format={"type": "json_object"})
    assert bound.reasoning_tokens(frozenset()) is None
    bytes_of = OutputMarks(ByteTokenizer(), OutputStyle(), Request.build(CHAT), [1])
    assert bytes_of.reasoning_tokens(frozenset()) is None


def test_the_styles_of_templates() -> None:
    styles = {name: family.style for name, family in FAMILIES.items()}
    assert {name: style.form for name, style in styles.items() if style.form != "object"} == {
        "Mistral, named": "named",
        "Mistral, numbered": "named",
        "DeepSeek V3": "named",
        "DeepSeek V3.1": "named",
        "Kimi K2": "named",
        "Qwen3-Coder": "tagged",
        "GLM 4.5": "elements",
        "MiniMax M2": "elements",
        "DeepSeek V3.2": "elements",
        "Gemma 4": "literals",
        "Llama 4, pythonic": "literals",
    }
    assert styles["Mistral, named"].reasoning_marks == ("[THINK]", "[/THINK]")
    assert styles["DeepSeek V3"].reasoning_marks == ("<think>", "</think>")
    assert styles["Hermes"].reasoning_marks == ()
    assert output_style("") == OutputStyle()
    for written in (
        '<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>',
        r"""{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": {}}\n</tool_call>" }}""",
    ):
        assert output_style(written) == styles["Hermes"]
    command_r = FAMILIES["Command R"].template.replace('"', r"\"")
    assert output_style(command_r) == styles["Command R"]


def test_what_a_response_template_says_in_words_has_precedence() -> None:
    """Its patterns do not have precedence: no pattern of a model runs in the gateway."""
    calls = {"open_pattern": r"\s*<call>", "close": "</call>", "content": "json", "repeats": True}
    reasoning = {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"}
    told = {"fields": {"tool_calls": calls, "reasoning_content": reasoning, "content": {}}}
    assert output_style("</think>", told) == OutputStyle(
        before="<call>",
        after="</call>",
        reasoning_before="<|channel>thought\n",
        reasoning_after="<channel|>",
    )
    hermes = FAMILIES["Hermes"].template
    for changed in (
        {"open_pattern": "<call:(?P<name>[a-z]+)>"},
        {"content": "xml-inline"},
        {"transform": {"type": "function", "function": {"name": "{name}"}}},
        {"close": ["</call>", "<end>"]},
    ):
        told = {"fields": {"tool_calls": {**calls, **changed}}}
        assert output_style(hermes, told) == output_style(hermes)
    for broken in (None, [], {"fields": []}, {"fields": {"tool_calls": None}}):
        assert output_style(hermes, broken) == output_style(hermes)
