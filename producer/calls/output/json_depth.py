"""Finds the end of JSON, character by character."""

from __future__ import annotations


class JsonDepth:
    """Counts the JSON objects and lists that are open. Brackets in strings do not count."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._in_string = self._escaped = False

    def feed(self, letter: str) -> None:
        """Reads the next character of the JSON."""
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
            self.depth += 1
        elif letter in "}]":
            self.depth -= 1
