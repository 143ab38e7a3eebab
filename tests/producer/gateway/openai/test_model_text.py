"""Texts of all families become the same reasoning, content and calls however they are cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptq.producer.calls.output.model_text import ExpectedOutput, ModelText, Piece, needed_of
from promptq.shared.protocol.output_style import OutputStyle
from tests.worker.text.families import ARGUMENTS, FAMILIES, NAMES, TOOLS, Family

ASKED = ExpectedOutput.of({"tools": TOOLS})
FORCED = ExpectedOutput.of({"tools": TOOLS, "tool_choice": "required"})
THINKING = OutputStyle(
    before="<tool_call>\n",
    after="\n</tool_call>",
    reasoning_before="<think>",
    reasoning_after="</think>",
)


def pieces_of(
    text: str, style: OutputStyle | None, asked: ExpectedOutput, cuts: list[int]
) -> Piece:
    """All pieces of a text that is cut there, put together."""
    reader, at = ModelText(style, asked), 0
    whole = Piece()
    for cut in [*sorted(cuts), len(text)]:
        whole += reader.feed(text[at:cut])
        at = cut
    whole += reader.finish()
    assert reader.num_calls == len(whole.calls)
    return whole


def read(
    text: str, style: OutputStyle | None = None, asked: ExpectedOutput = ASKED
) -> tuple[Any, ...]:
    """Returns reasoning, content and calls; they are equal if the text comes letter by letter."""
    whole = pieces_of(text, style, asked, [])
    assert pieces_of(text, style, asked, list(range(len(text)))) == whole
    calls = [(it.name, it.arguments) for it in whole.calls]
    return whole.reasoning, whole.content, calls


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_a_family(name: str) -> None:
    """Two in parallel, after content, and then nothing else."""
    family = FAMILIES[name]
    style = OutputStyle.from_json(family.style.to_json())
    reasoning, content, calls = read(family.content + family.calls, style)
    assert (reasoning, content) == ("", family.content)
    assert [called for called, _ in calls] == [*NAMES]
    assert [json.loads(it) for _, it in calls] == [json.loads(it) for it in ARGUMENTS]
    assert read(family.calls + "\n", style)[2] == calls


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_that_is_cut_is_never_content(name: str) -> None:
    """Before its name is whole there is no call, and from then on there is one."""
    family, had = FAMILIES[name], False
    text = family.forced
    for end in range(len(text) + 1):
        _, content, calls = read(text[:end], family.style, FORCED)
        assert content == ""
        assert read(text[:end] + "\ufffd", family.style, FORCED)[1] == "", "half a character"
        assert calls in ([], [("stop-all", "")], [("stop-all", "{")], [("stop-all", "{}")])
        assert bool(calls) >= had, "a call that was there does not go away"
        had = bool(calls)
    assert calls == [("stop-all", "{}")]


def some_text(family: Family) -> st.SearchStrategy[str]:
    """Of parts of the family's marks in any order, and its own calls."""
    style = family.style
    marks = [
        *style.call_marks,
        *style.reasoning_marks,
        family.calls,
        '{"name": "f"',
        "{}",
        "<",
        " ",
    ]
    marks += [f'"{style.arguments_key}": {{', '"', "}", ", ", "\n", "abc", "\\", "["]
    cut = st.tuples(st.sampled_from(marks), st.integers(0, 40)).map(lambda it: it[0][: it[1] or 99])
    return st.lists(cut, max_size=12).map("".join)


@pytest.mark.parametrize("asked", [ASKED, FORCED], ids=["free", "forced"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_cut_gives_the_same(asked: ExpectedOutput, data: st.DataObject) -> None:
    family = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    style = family.style
    if data.draw(st.booleans()):
        style = replace(style, reasoning_before="<think>", reasoning_after="</think>")
    text = data.draw(some_text(family))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert pieces_of(text, style, asked, cuts) == pieces_of(text, style, asked, [])


@settings(max_examples=60)
@given(data=st.data())
def test_a_text_without_a_call_is_all_content(data: st.DataObject) -> None:
    family = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    text = data.draw(some_text(family))
    whole = pieces_of(text, replace(family.style, reasoning_before=""), ASKED, [])
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nWell.\n\nSo.\n</think>\n\nYes.", "Well.\n\nSo.", "Yes."),
        ("\n<think>Well</think>Yes </think>.", "Well", "Yes </think>."),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>cut </thi", "cut </thi", ""),
        ("<think>cut \n", "cut", ""),
        ("<thin", "", "<thin"),
        (" Yes <think>no</think>", "", " Yes <think>no</think>"),
        ("", "", ""),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    assert read(text, THINKING) == (reasoning, content, [])


def test_reasoning_before_a_call() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>I call <tool_call>.</think>\n{call}"
    assert read(text, THINKING) == ("I call <tool_call>.", "", [("f", '{"a": 1}')])


def test_only_what_was_asked_for_is_looked_for() -> None:
    """A grammar leaves no place for reasoning, and without tools there are no calls."""
    text = "<think>a</think>" + FAMILIES["Hermes"].calls
    json_asked = ExpectedOutput.of({"response_format": {"type": "json_object"}})
    assert read(text, THINKING, json_asked) == ("", text, [])
    assert read(text, THINKING, ExpectedOutput.of({}))[1] == FAMILIES["Hermes"].calls
    none = ExpectedOutput.of({"tools": TOOLS, "tool_choice": "none"})
    assert read(text, THINKING, none)[1] == FAMILIES["Hermes"].calls
    assert read(text, None) == ("", text, [])


def test_an_unknown_form_means_content() -> None:
    """And a style of an earlier release, or with more than is known here, is read."""
    text = FAMILIES["Hermes"].calls
    unknown = OutputStyle.from_json(replace(THINKING, form="knots").to_json())
    assert read("<think>a</think>" + text, unknown) == ("a", text, [])
    earlier = '{"arguments_key": "arguments", "before": "<tool_call>", "after": "</tool_call>"}'
    later = json.loads(THINKING.to_json()) | {"colour": 1}
    for style in map(OutputStyle.from_json, (earlier, json.dumps(later))):
        assert [name for name, _ in read(text, style)[2]] == [*NAMES]
    for broken in ("", "null", "[]", "{}", '"before"', '{"arguments_key": 1}'):
        assert OutputStyle.from_json(broken) is None


def test_tagged_values_have_the_types_of_the_schema() -> None:
    """Text where the schema says text; JSON of another type than the schema allows is text."""
    types = {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "kind": {"enum": ["1", "2"]},
        "any": {},
    }
    values = {
        "text": "5\n<p>", "maybe": "5", "count": "5", "flag": "True", "kind": "1", "any": "[5]",
        "other": "x",
    }  # fmt: skip
    tool = {"function": {"name": "f", "parameters": {"properties": types}}}
    inside = "".join(f"<parameter={it}>\n{value}\n</parameter>\n" for it, value in values.items())
    text = f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"
    asked = ExpectedOutput.of({"tools": [tool]})
    [(name, arguments)] = read(text, FAMILIES["Qwen3-Coder"].style, asked)[2]
    expected = {
        "text": "5\n<p>", "maybe": "5", "count": 5, "flag": True, "kind": "1", "any": [5],
        "other": "x",
    }  # fmt: skip
    assert (name, json.loads(arguments)) == ("f", expected)
    cut = text[: text.index("<p>") + 2]
    assert read(cut, FAMILIES["Qwen3-Coder"].style, asked)[2] == [("f", '{"text": "5\\n<p')]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "stop-all"}}},
        {"tools": [{}, {"function": 3}, {"function": {"name": "a", "parameters": []}}]},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}, "tools": TOOLS},
    ],
)
def test_little_of_a_call_is_needed_to_read_its_answer(fields: dict[str, Any]) -> None:
    assert ExpectedOutput.of(needed_of(fields)) == ExpectedOutput.of(fields)
