"""The arguments of a call between tags, such as <parameter=city>Paris</parameter>, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from promptq.producer.calls.output.reasoning import overlap

_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    type(None): frozenset({"null"}),
}
_PYTHON = {"True": True, "False": False, "None": None}
"""Templates write earlier calls with these words, so models write them too."""
_LONGEST_KEY = 256


class TaggedArguments:
    """Reads arguments letter by letter.

    A value is text if its schema has the type `string` alone. Another value is JSON if its JSON has
    a type that the schema allows, and text otherwise.
    """

    def __init__(
        self, tags: tuple[str, str, str, str], types: Mapping[str, frozenset[str]]
    ) -> None:
        self._key_before, self._key_after, self._value_after, self._closing = (
            tag.strip() for tag in tags
        )
        self.are_over = False
        self._types = types
        self._held = ""
        self._key = ""
        self._is_text = False
        self._num_values = 0
        self._state: Callable[[], str] = self._between

    def feed(self, letter: str) -> str:
        """Reads the next letter. Returns the JSON that is certain now."""
        self._held += letter
        return self._state()

    def _between(self) -> str:
        if self._held.endswith(self._key_before):
            self._held, self._state = "", self._in_key
        elif "".join(self._held.split()).endswith("".join(self._closing.split())):
            self.are_over = True
            return "}" if self._num_values else "{}"
        self._held = self._held[-_LONGEST_KEY:]
        return ""

    def _in_key(self) -> str:
        if not self._held.endswith(self._key_after):
            if len(self._held) > _LONGEST_KEY:
                self._held, self._state = "", self._between
            return ""
        self._key = self._held.removesuffix(self._key_after).strip()
        self._is_text = self._types.get(self._key) == _TYPES[str]
        self._held, self._state = "", self._in_value
        before = ", " if self._num_values else "{"
        self._num_values += 1
        return f"{before}{json.dumps(self._key)}: " + ('"' if self._is_text else "")

    def _in_value(self) -> str:
        """A value may have a line to itself."""
        if self._held == "\n":
            self._held, self._state = "", self._in_line
            return ""
        self._state = self._in_line
        return self._in_line()

    def _in_line(self) -> str:
        is_over = self._held.endswith(self._value_after)
        if is_over:
            text = self._held.removesuffix(self._value_after).removesuffix("\n")
            self._held, self._state = "", self._between
            return _inside(text) + '"' if self._is_text else self._value(text)
        if not self._is_text:
            return ""
        num_held = overlap(self._held, "\n" + self._value_after)
        num_held = num_held or overlap(self._held, self._value_after)
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return _inside(text)

    def _value(self, text: str) -> str:
        allowed = self._types.get(self._key, frozenset())
        try:
            value: Any = _PYTHON[text] if text in _PYTHON else json.loads(text, parse_constant=_no)
        except (ValueError, RecursionError):
            value = text
        if allowed and not _TYPES[type(value)] & allowed:
            value = text
        return json.dumps(value, ensure_ascii=False)


def _inside(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _no(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
