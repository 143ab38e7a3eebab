"""Separates the reasoning, which a model writes first and between marks, from its answer."""

from __future__ import annotations

from collections.abc import Callable

from promptq.producer.calls.output.marks import overlap


class ReasoningText:
    """Reads the text up to the end of its reasoning, and passes on the rest.

    White space around the reasoning belongs to neither part. The result depends only on the text so
    far.
    """

    def __init__(self, before: str, after: str) -> None:
        self._before, self._after = before.strip(), after.strip()
        self._held = ""
        self._has_begun = False  # whether some reasoning was returned
        self._state: Callable[[str], tuple[str, str]] = self._at_start

    def feed(self, text: str) -> tuple[str, str]:
        """Reads more text. Returns the reasoning and the rest that are certain now."""
        return self._state(text)

    def finish(self) -> tuple[str, str]:
        """Ends the text. Returns the part that was held back."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state == self._inside else ("", held)

    def _at_start(self, text: str) -> tuple[str, str]:
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith(self._before):
            self._held, self._state = "", self._inside
            return self._inside(begun[len(self._before) :])
        if self._before.startswith(begun):
            return "", ""
        self._state = self._in_rest
        held, self._held = self._held, ""
        return "", held

    def _inside(self, text: str) -> tuple[str, str]:
        held = self._held + text
        if not self._has_begun:
            held = held.lstrip()
        end = held.find(self._after)
        if end >= 0:
            self._held, self._state = "", self._at_rest
            rest = self._at_rest(held[end + len(self._after) :])[1]
            return held[:end].rstrip(), rest
        certain = held[: len(held) - overlap(held, self._after)].rstrip()
        self._has_begun = self._has_begun or bool(certain)
        self._held = held[len(certain) :]
        return certain, ""

    def _at_rest(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        if text:
            self._state = self._in_rest
        return "", text

    def _in_rest(self, text: str) -> tuple[str, str]:
        return "", text
