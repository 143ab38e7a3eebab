"""Tool calls as OpenAI's clients get them, found in the text that a model writes.

The search reads letter by letter. Its result depends only on the text, not on the pieces in which
the text came. So a stream that is read again gives the same chunks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from promptq.shared.protocol.tool_call_style import ToolCallStyle

_STRING = ""
"""Stands for a JSON string, the tool's name, among the literals of a head."""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """One more piece of call `index`. The first piece has the `name`."""

    index: int
    arguments: str
    name: str | None = None


class ToolText:
    """Separates calls from the text around them. Without a style there are no calls."""

    def __init__(self, style: ToolCallStyle | None) -> None:
        style = style or ToolCallStyle()
        self.num_calls = 0
        self._opening, self._closing = style.before.strip(), style.after.strip()
        key = json.dumps(style.arguments_key)
        self._head = ("{", '"name"', ":", _STRING, ",", key, ":", "{")
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        # Without an opening, only a text that begins with a call has one.
        self._state = self._in_content if self._opening else self._in_head
        self._held = ""  # text that may still turn out to be a call
        self._element, self._matched, self._name = 0, "", ""
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Read more text. Gives what is certain now: content, and pieces of calls."""
        for letter in text:
            self._state(letter)
        return self._take()

    def finish(self) -> str:
        """The content that was held back when the text ended."""
        if self._state in (self._in_content, self._in_head):
            self._content.append(self._held if self._held.strip() or not self.num_calls else "")
            self._held = ""
        return self._take()[0]

    def _take(self) -> tuple[str, list[ToolDelta]]:
        content, deltas = "".join(self._content), _merged(self._deltas)
        self._content, self._deltas = [], []
        return content, deltas

    def _in_content(self, letter: str) -> None:
        self._held += letter
        if self.num_calls and self._held.isspace():
            return  # between two calls
        while self._held and not self._opening.startswith(self._held.lstrip() or self._held):
            self._content.append(self._held[0])
            self._held = self._held[1:]
        if self._held.strip() == self._opening:
            self._state = self._in_head
            self._element, self._matched = 0, ""

    def _in_plain(self, letter: str) -> None:
        self._content.append(letter)

    def _in_head(self, letter: str) -> None:
        self._held += letter
        literal = self._head[self._element]
        if not self._matched and letter.isspace():
            return
        self._matched += letter
        if literal == _STRING:
            if not self._matched.startswith('"'):
                self._no_call()
            elif len(self._matched) > 1 and letter == '"' and not _escapes(self._matched[:-1]):
                self._name, self._matched = self._matched, ""
                self._element += 1
        elif not literal.startswith(self._matched):
            self._no_call()
        elif literal == self._matched:
            self._matched = ""
            self._element += 1
            if self._element == len(self._head):
                self._begin_call()

    def _no_call(self) -> None:
        """The text only looked like a call."""
        held, self._held = self._held, ""
        self._content.append(held)
        self._state = self._in_content if self._opening else self._in_plain

    def _begin_call(self) -> None:
        try:
            name = str(json.loads(self._name))
        except ValueError:
            self._no_call()
            return
        self._held = ""
        self._deltas.append(ToolDelta(self.num_calls, "{", name))
        self.num_calls += 1
        self._depth, self._in_string, self._escaped = 1, False, False
        self._state = self._in_arguments

    def _in_arguments(self, letter: str) -> None:
        self._deltas.append(ToolDelta(self.num_calls - 1, letter))
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._state = self._in_tail

    def _in_tail(self, letter: str) -> None:
        """Skip everything up to the call's closing."""
        self._held += letter
        if self._held.endswith(self._closing or "}"):
            self._held = ""
            self._state = self._in_content if self._opening else self._in_plain


def call_id(request_id: str, index: int) -> str:
    """The id of a request's call. It is the same each time the request is read."""
    digest = hashlib.sha256(f"{request_id}\n{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def split_calls(
    text: str, style: ToolCallStyle | None, request_id: str
) -> tuple[str, list[dict[str, Any]]]:
    """The content of a whole text, and the calls in it."""
    tools = ToolText(style)
    content, deltas = tools.feed(text)
    content += tools.finish()
    calls = [
        {
            "id": call_id(request_id, delta.index),
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }
        for delta in deltas
    ]
    return content, calls


def _escapes(text: str) -> bool:
    """Whether the next letter is escaped, by an odd number of backslashes."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _merged(deltas: list[ToolDelta]) -> list[ToolDelta]:
    merged: list[ToolDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if last is not None and last.index == delta.index:
            merged[-1] = ToolDelta(last.index, last.arguments + delta.arguments, last.name)
        else:
            merged.append(delta)
    return merged
