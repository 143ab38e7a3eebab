"""Converts tags, such as <parameter=city>Paris</parameter>, to the JSON of a call's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from promptq.producer.calls.output.marks import overlap, squeezed, without
from promptq.shared.protocol.output_style import OutputStyle

JSON_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    type(None): frozenset({"null"}),
}
_CONSTANTS = {"True": True, "False": False, "None": None}
"""Python's constants. Templates write them in earlier calls, so models write them in new calls."""
_LONGEST_KEY = 256


class TaggedArguments:
    """Parser of a call's arguments in tags, such as <parameter=city>Paris</parameter>.

    A value is a string if its tag says so, or if its schema allows only the type `string`. Any
    other value is read as JSON if the schema allows the JSON's type, otherwise as a string.
    """

    def __init__(
        self, style: OutputStyle, types: Mapping[str, frozenset[str]], *, in_lines: bool
    ) -> None:
        self._key_before, self._after = style.key_before.strip(), squeezed(style.after)
        self._key_ends = [mark for mark in (style.key_after, style.key_after_json) if mark]
        self._value_after = style.value_after.strip()
        self._is_typed = bool(style.key_after_json)
        self._in_lines = in_lines
        """Whether one line break on each side of a value does not belong to the value."""
        self.are_over = False
        self._types = types
        self._held = ""
        self._parts: list[str] = []  # text before `_held` of a value that is not a string
        self._key, self._allowed = "", frozenset[str]()
        self._is_text = False
        self._num_values = 0
        self._state: Callable[[], str] = self._between

    def feed(self, letter: str) -> str:
        """Reads the next character. Returns the next piece of the arguments' JSON, or ''."""
        self._held += letter
        return self._state()

    def _between(self) -> str:
        if self._held.endswith(self._key_before):
            self._held, self._state = "", self._in_key
        elif squeezed(self._held).endswith(self._after):
            self.are_over = True
            return "}" if self._num_values else "{}"
        self._held = self._held[-_LONGEST_KEY:]
        return ""

    def _in_key(self) -> str:
        dense = squeezed(self._held)
        end = next((mark for mark in self._key_ends if dense.endswith(squeezed(mark))), None)
        if end is None:
            if len(self._held) > _LONGEST_KEY:
                self._held, self._state = "", self._between
            return ""
        self._key = without(self._held, end)
        self._allowed = self._types.get(self._key, frozenset())
        if self._is_typed:
            self._is_text = end == self._key_ends[0]
            self._allowed = frozenset()
        else:
            self._is_text = self._allowed == JSON_TYPES[str]
        self._held, self._state = "", self._in_value
        before = ", " if self._num_values else "{"
        self._num_values += 1
        return f"{before}{json.dumps(self._key)}: " + ('"' if self._is_text else "")

    def _in_value(self) -> str:
        self._state = self._in_line
        if self._in_lines and self._held == "\n":
            self._held = ""
            return ""
        return self._in_line()

    def _in_line(self) -> str:
        is_over = self._held.endswith(self._value_after)
        if is_over:
            text = "".join(self._parts) + self._held.removesuffix(self._value_after)
            self._parts.clear()
            text = text.removesuffix("\n") if self._in_lines else text
            self._held, self._state = "", self._between
            return inside(text) + '"' if self._is_text else as_json(text, self._allowed)
        if not self._is_text:
            if len(self._held) > _LONGEST_KEY:
                certain = len(self._held) - len(self._value_after)
                self._parts.append(self._held[:certain])
                self._held = self._held[certain:]
            return ""
        num_held = overlap(self._held, "\n" + self._value_after) if self._in_lines else 0
        num_held = num_held or overlap(self._held, self._value_after)
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return inside(text)


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Returns the JSON in the text if this JSON has an `allowed` type, otherwise the text as a JSON
    string. An empty `allowed` allows any type."""
    try:
        value: Any = (
            _CONSTANTS[text] if text in _CONSTANTS else json.loads(text, parse_constant=_no)
        )
        if not allowed or JSON_TYPES[type(value)] & allowed:
            # ValueError for 1e999, which Python reads as infinity.
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def inside(text: str) -> str:
    """Returns the text as a JSON string without its quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _no(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
