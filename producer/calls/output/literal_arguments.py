"""Converts literals, such as city="Paris", days=[1, None], to the JSON of a call's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from promptq.producer.calls.output.marks import overlap
from promptq.producer.calls.output.tagged_arguments import JSON_TYPES, as_json, inside
from promptq.shared.protocol.output_style import OutputStyle

_CLOSERS = {"{": "}", "[": "]"}
_PUNCTUATION = "{}[](),:="
_ESCAPES = {
    **{letter: f"\\{letter}" for letter in '"\\/bfnrt'},
    "'": "'",
    "\n": "",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
}
"""Maps a character that may follow a backslash, in a string of Python or JSON, to JSON."""
_NULLS = {"null": "None", "none": "None", "nil": "None"}
_CHARACTERS = 0x110000
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class LiteralArguments:
    """Parser of a call's arguments that are literals, such as city="Paris", days=[1, None].

    The parser stops at the first character of the mark that ends the call. If an argument's schema
    allows no strings, a string is parsed as JSON. Some templates write all values of earlier calls
    as strings, so models may do this in new calls.
    """

    def __init__(self, style: OutputStyle, types: Mapping[str, frozenset[str]]) -> None:
        self._quote, self._key_end = style.quote, style.key_after.strip()
        self._quotes = (style.quote,) if style.quote else ("'", '"')
        self._types = types
        self.are_over = False
        self._closers = [style.after.strip()[0]]
        self._counts = [0]  # items in each of the open containers
        self._wants_key, self._lacks_value = True, False
        self._key: str | None = None  # a key that was a string
        self._allowed = frozenset[str]()
        self._word: list[str] = []  # characters outside strings
        self._held = ""
        self._string_end = ""
        self._kept: list[str] | None = None  # characters of a string that is a key or JSON
        self._escape = ""
        self._state: Callable[[str], str] = self._outside

    def feed(self, letter: str) -> str:
        """Reads the next character. Returns the next piece of the arguments' JSON, or ''."""
        return self._state(letter)

    def _outside(self, letter: str) -> str:
        if letter.isspace() and not self._word:
            return ""
        self._word.append(letter)
        begun = "".join(self._word[: len(self._quotes[0]) + 1])
        if begun in self._quotes:
            return self._open_string(begun)
        if letter not in _PUNCTUATION:
            return ""
        if letter in _CLOSERS and len(self._word) == 1 and not self._wants_key:
            return self._item() + self._open(letter)
        is_end = letter == self._closers[-1]
        if self._wants_key:
            if letter == (self._key_end if len(self._closers) == 1 else ":"):
                word = self._take_word()
                return self._open_value(word if self._key is None else self._key)
            if not is_end and letter != ",":
                return ""
            self._word.clear()
            return self._close() if is_end else ""
        if not is_end and letter != ",":
            return ""
        word = self._take_word() or "null" * self._lacks_value
        value = self._item() + self._value(word) if word else ""
        if is_end:
            return value + self._close()
        self._wants_key = self._closers[-1] != "]"
        return value

    def _take_word(self) -> str:
        """Returns the word before the punctuation character that was just read."""
        word = "".join(self._word[:-1]).rstrip()
        self._word.clear()
        return word

    def _item(self) -> str:
        """Begins a value. Returns ', ' if its list has an earlier value, otherwise ''."""
        self._lacks_value = False
        if self._closers[-1] != "]":
            return ""
        self._counts[-1] += 1
        return ", " if self._counts[-1] > 1 else ""

    def _open_value(self, key: str) -> str:
        before = ", " if self._counts[-1] else "{"
        self._counts[-1] += 1
        if len(self._closers) == 1:
            self._allowed = self._types.get(key, frozenset())
        self._wants_key, self._key = False, None
        self._lacks_value = True
        return f"{before}{json.dumps(key)}: "

    def _value(self, word: str) -> str:
        """Converts an unquoted word to JSON: a number, a constant, or otherwise a string."""
        allowed = self._allowed if len(self._closers) == 1 else frozenset[str]()
        for written in (_NULLS.get(word, word), _number(word)):
            json_text = as_json(written, allowed)
            if not json_text.startswith('"'):
                return json_text
        return json.dumps(word, ensure_ascii=False)

    def _open(self, letter: str) -> str:
        self._word.clear()
        self._closers.append(_CLOSERS[letter])
        self._counts.append(0)
        self._wants_key = letter == "{"
        return "[" if letter == "[" else ""  # an object begins with its first key

    def _close(self) -> str:
        closer, count = self._closers.pop(), self._counts.pop()
        self.are_over = not self._closers
        self._wants_key = False
        if closer == "]":
            return "]"
        return "}" if count else "{}"

    def _open_string(self, mark: str) -> str:
        self._word.clear()
        self._string_end = mark
        self._state = self._in_string
        is_value = not self._wants_key
        is_text = not self._allowed or bool(JSON_TYPES[str] & self._allowed)
        self._kept = None if is_value and (is_text or len(self._closers) > 1) else []
        return self._item() + '"' if self._kept is None else ""

    def _in_string(self, letter: str) -> str:
        if self._escape:
            return self._in_escape(letter)
        if letter == "\\" and not self._quote:
            self._escape = letter
            return ""
        self._held += letter
        if self._held.endswith(self._string_end):
            text = self._held.removesuffix(self._string_end)
            self._held = ""
            return self._written(inside(text)) + self._close_string()
        text = self._held[: len(self._held) - overlap(self._held, self._string_end)]
        self._held = self._held[len(text) :]
        return self._written(inside(text))

    def _written(self, json_text: str) -> str:
        if self._kept is None:
            return json_text
        self._kept.append(json_text)
        return ""

    def _close_string(self) -> str:
        self._state = self._outside
        if self._kept is None:
            return '"'
        text = json.loads(f'"{"".join(self._kept)}"').encode(errors="replace").decode()
        self._kept = None
        if self._wants_key:
            self._key = text
            return ""
        return self._item() + as_json(text, self._allowed)

    def _in_escape(self, letter: str) -> str:
        kind, digits = (self._escape + letter)[1], (self._escape + letter)[2:]
        if kind not in _HEX_DIGITS:
            self._escape = ""
            return self._written(_ESCAPES.get(kind, inside("\\" + kind)))
        if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            escape, self._escape = self._escape, ""
            return self._written(inside(escape)) + self._in_string(letter)
        self._escape += letter
        if len(digits) < _HEX_DIGITS[kind]:
            return ""
        self._escape = ""
        number = int(digits, 16)
        return self._written(json.dumps(chr(number) if number < _CHARACTERS else "\ufffd")[1:-1])


def _number(word: str) -> str:
    """Converts a number such as `1.`, which JSON does not allow. Returns other words unchanged."""
    try:
        return repr(float(word))
    except ValueError:
        return word
