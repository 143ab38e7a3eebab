"""Separates the reasoning between marks, at the beginning of a model's text, from the answer."""

from __future__ import annotations

from collections.abc import Callable

from promptq.producer.calls.output.marks import overlap


class ReasoningText:
    """Parser of a text that may begin with reasoning between marks, such as `<think>` and
    `</think>`. White space around the reasoning is dropped."""

    def __init__(self, before: str, after: str) -> None:
        self._before, self._after = before.strip(), after.strip()
        self._blank: list[str] = []  # white space before the held text
        self._held = ""
        self._has_begun = False  # whether some reasoning was returned
        self._state: Callable[[str], tuple[str, str]] = self._at_start

    def feed(self, text: str) -> tuple[str, str]:
        """Reads more text. Returns new text of the reasoning and of the answer. Holds back text
        that may be the beginning of a mark."""
        return self._state(text)

    def finish(self) -> tuple[str, str]:
        """Ends the text. Returns the reasoning and the answer that `feed` has held back."""
        held, self._held = self._held, ""
        if self._state == self._inside:
            return self._certain(held.rstrip()), ""
        return "", "".join(self._blank) + held

    def _at_start(self, text: str) -> tuple[str, str]:
        text = self._held + text
        self._held = begun = text.lstrip()
        self._blank.append(text[: len(text) - len(begun)])
        if begun.startswith(self._before):
            self._held, self._state = "", self._inside
            self._blank.clear()
            return self._inside(begun[len(self._before) :])
        if self._before.startswith(begun):
            return "", ""
        rest, self._state = self.finish()[1], self._in_rest
        self._blank.clear()
        return "", rest

    def _inside(self, text: str) -> tuple[str, str]:
        text = self._held + text
        end = text.find(self._after)
        if end >= 0:
            self._held, self._state = "", self._at_rest
            reasoning = self._certain(text[:end].rstrip())
            self._blank.clear()
            return reasoning, self._at_rest(text[end + len(self._after) :])[1]
        size = len(text) - overlap(text, self._after)
        certain, self._held = text[:size].rstrip(), text[size:]
        reasoning = self._certain(certain)
        self._blank.append(text[len(certain) : size])
        return reasoning, ""

    def _certain(self, text: str) -> str:
        """Returns a piece of reasoning, with the white space that was held before it (`_blank`).
        The first piece begins without white space."""
        if not text:
            return ""
        text = "".join(self._blank) + text if self._has_begun else text.lstrip()
        self._blank.clear()
        self._has_begun = True
        return text

    def _at_rest(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        if text:
            self._state = self._in_rest
        return "", text

    def _in_rest(self, text: str) -> tuple[str, str]:
        return "", text
