"""Calls of tools in texts, whole and in pieces."""

from __future__ import annotations

import pytest

from promptq.producer.calls.output.tool_calls import ToolDelta, ToolText
from promptq.shared.protocol.output_style import OutputStyle

BARE = OutputStyle()
LLAMA = OutputStyle(arguments_key="parameters")
TAGS = OutputStyle(before="<tool_call>\n", after="\n</tool_call>")

CALL = '{"name": "f", "arguments": {"a": {"b": "}\\"{"}}}'
ARGUMENTS = '{"a": {"b": "}\\"{"}}'


def read(style: OutputStyle, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and name and arguments of each call."""
    tools = ToolText(style)
    content, names, arguments = "", list[str](), list[str]()

    def take(deltas: list[ToolDelta]) -> None:
        for delta in deltas:
            if delta.name is not None:
                names.append(delta.name)
                arguments.append("")
            arguments[delta.index] += delta.arguments

    for piece in pieces:
        more, deltas = tools.feed(piece)
        content += more
        take(deltas)
    more, deltas = tools.finish()
    content += more
    take(deltas)
    assert tools.num_calls == len(names)
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        (BARE, "Hello.", "Hello.", []),
        (BARE, CALL, "", [("f", ARGUMENTS)]),
        (BARE, f"  {CALL}\n", "\n", [("f", ARGUMENTS)]),
        (BARE, f"I call {CALL}", f"I call {CALL}", []),
        (BARE, '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        (BARE, '{"name": "f"', '{"name": "f"', []),
        (BARE, '{"name":"f","arguments":{"a":', "", [("f", '{"a":')]),
        (BARE, '{"name": "a\\"\\\\b", "arguments": {}}', "", [('a"\\b', "{}")]),
        (LLAMA, '{"name": "f", "parameters": {"a": [1]}}', "", [("f", '{"a": [1]}')]),
        (TAGS, f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
        (TAGS, f"Well <tool_call>{CALL}</tool_call>", "Well ", [("f", ARGUMENTS)]),
        (
            TAGS,
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
            "",
            [("f", ARGUMENTS), ("f", ARGUMENTS)],
        ),
        (TAGS, f"<tool_call>{CALL}</tool_call> so", " so", [("f", ARGUMENTS)]),
        (TAGS, "a < b <tool", "a < b <tool", []),
        (TAGS, "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        (TAGS, CALL, CALL, []),
        (
            TAGS,
            f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call><tool_call>{CALL}',
            "",
            [("f", '{"a": {"b": "}\\"{"}}'), ("f", ARGUMENTS)],
        ),
        (TAGS, 'a <tool_call>{"id": 1, "name": "f"}</tool_call> b', "a  b", [("f", "{}")]),
        (TAGS, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        *(
            (TAGS, text, text, [])
            for text in (
                '<tool_call>{"arguments": {"a": 1',
                '<tool_call>{"arguments": [], "name": "f"}</tool_call>.',
                '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>.',
                '<tool_call>{"arguments": {}}</tool_call>.',
            )
        ),
    ],
)
def test_calls_in_a_text(
    style: OutputStyle, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """The same, in whatever pieces the text comes."""
    assert read(style, [text]) == (content, calls)
    assert read(style, list(text)) == (content, calls)
    for size in (2, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(style, pieces) == (content, calls)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_object_in_the_text_behind_a_call_is_no_call(size: int) -> None:
    style = OutputStyle(arguments_key="parameters", between="; ", prelude="<|python_tag|>")
    behind = ' I suggest {"name": "g", "parameters": {"a": 1}} instead'
    text = '{"name": "f", "parameters": {}}' + behind
    content, calls = read(style, [text[at : at + size] for at in range(0, len(text), size)])
    assert (content.strip(), calls) == (behind.strip(), [("f", "{}")])
