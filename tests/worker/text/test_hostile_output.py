"""Texts and styles that nobody writes on purpose: no reader fails, and none is quadratic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from time import process_time

import pytest

from promptq.producer.calls.output.model_text import ExpectedOutput, ModelText, read_whole
from promptq.producer.calls.output.tool_calls import ToolText
from promptq.shared.protocol.output_style import OutputStyle
from tests.worker.text.formats import FORMATS, TOOLS

EXPECTED = ExpectedOutput.of({"tools": TOOLS})
FORCED = ExpectedOutput.of({"tools": TOOLS, "tool_choice": "required"})
GLM = replace(FORMATS["glm-4.5"].style, reasoning_before="<think>", reasoning_after="</think>")


@pytest.mark.parametrize("name", FORMATS)
def test_a_style_may_lack_any_of_its_marks(name: str, seed: int) -> None:
    """Another release, or a stranger, may have written it to the queue."""
    rng = random.Random(seed)
    whole = FORMATS[name].style
    others = {"form", "without_tools"}
    marks = [each.name for each in fields(OutputStyle) if each.name not in others]
    parts = [*whole.call_marks, *whole.reasoning_marks, "f", "{", "}", '"']
    parts += ["a=1", ")", "\n", " "]
    for _ in range(60):
        missing = dict.fromkeys(rng.sample(marks, rng.randint(1, 4)), "")
        style = OutputStyle.from_json(replace(whole, **missing).to_json())
        text = "".join(rng.choices(parts, k=rng.randint(0, 14)))
        for expected in (EXPECTED, FORCED):
            reader = ModelText(style, expected)
            pieces = [reader.feed(letter) for letter in text] + [reader.finish()]
            assert sum(pieces[1:], pieces[0]) == read_whole(text, style, expected), missing


def test_a_forced_call_after_white_space_reads_the_same_in_pieces() -> None:
    style = replace(FORMATS["gpt-oss"].style, between="", key_after_json="")
    reader = ModelText(style, FORCED)
    pieces = [reader.feed(letter) for letter in " {1"] + [reader.finish()]
    assert sum(pieces[1:], pieces[0]) == read_whole(" {1", style, FORCED)


TEXTS: dict[str, tuple[OutputStyle, Callable[[int], str]]] = {
    "white space": (GLM, lambda size: " " * size + "x"),
    "white space in channels": (FORMATS["gpt-oss"].style, lambda size: " " * size + "x"),
    "white space in reasoning": (GLM, lambda size: "<think>a" + " " * size + "x"),
    "white space of a call": (GLM, lambda size: "<tool_call>" + " " * size + "x"),
    "a value": (GLM, lambda size: "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>" + "1" * size),
    "a word": (FORMATS["pythonic"].style, lambda size: "[f(a=" + "x" * size),
    "brackets": (FORMATS["pythonic"].style, lambda size: "[f(a=(" + "(" * size),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("what", TEXTS)
def test_reading_takes_time_by_length(what: str) -> None:
    """Four times as long takes eight times as long at most; by square, it would be sixteen."""
    style, text_of = TEXTS[what]

    def seconds(size: int) -> float:
        reader, begun = ModelText(style, EXPECTED), process_time()
        for letter in text_of(size):
            reader.feed(letter)
        reader.finish()
        return process_time() - begun

    seconds(100)
    short = min(seconds(25_000) for _ in range(3))
    assert min(seconds(100_000) for _ in range(2)) < 8 * short


class CountingText(ToolText):
    num_read = 0

    def _in_head(self, letter: str) -> None:
        self.num_read += 1
        super()._in_head(letter)


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.style.before])
def test_marks_in_a_row_are_read_a_few_times(name: str) -> None:
    """Each may be a call, whose name would contain the marks after it."""
    style = FORMATS[name].style
    text = style.as_elements.before * 500
    reader = CountingText(style)
    content, calls = reader.feed(text)
    assert (content + reader.finish()[0], calls) == (text, [])
    assert reader.num_read <= 3 * len(text)
