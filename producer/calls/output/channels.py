"""Parses a text that consists of messages, each with a header that names channel and recipient."""

from __future__ import annotations

from promptq.producer.calls.output.json_depth import JsonDepth
from promptq.producer.calls.output.marks import overlap
from promptq.producer.calls.output.tool_calls import ToolDelta, ToolText, merged
from promptq.shared.protocol.output_style import OutputStyle

_LONGEST_HEADER = 256
_SLICE = 1024
"""Number of characters that are read at once. With more, the searches for marks would be slower."""
_BETWEEN_MESSAGES = "\n"
_REASONING, _CONTENT, _CALL, _REST = "reasoning", "content", "call", "rest"


class ChannelText:
    """Parser of a text in the form `channels` of `OutputStyle`: messages, each with a header.

    A text without a header is content. But if a call is `forced`, such a text may be a JSON object:
    workers of earlier releases write forced calls as objects.
    """

    def __init__(self, style: OutputStyle, *, with_tools: bool, forced: bool = False) -> None:
        self._num_calls = 0
        self._object: ToolText | None = None
        self._is_at_start = True
        self._with_tools, self._forced = with_tools, forced
        self._before, self._middle = style.before, style.middle
        self._tool = style.prelude.strip()
        self._starts = (style.opening, style.before, self._tool)
        self._ends = (style.closing, style.after, style.opening, style.before)
        self._reasoning_channel = style.reasoning_before.removeprefix(style.before).removesuffix(
            style.middle
        )
        self._blank: list[str] = []  # white space before a text that may begin with a header
        self._held = ""  # text that was not parsed yet
        self._kind = ""  # of the current message
        self._is_empty = True
        """Whether no text of the current message was found yet."""
        self._texts = {_REASONING: "", _CONTENT: ""}
        self._kinds_read = set[str]()
        self._deltas: list[ToolDelta] = []
        self._json: JsonDepth | None = None
        """Parser that finds the end of a call's arguments."""
        self._in_header = False

    @property
    def num_calls(self) -> int:
        """Number of tool calls that were found so far."""
        return self._num_calls if self._object is None else self._object.num_calls

    def feed(self, text: str) -> tuple[str, str, list[ToolDelta]]:
        """Reads more text. Returns the new reasoning, the new content, and new pieces of calls.
        Holds back text that may be the beginning of a mark."""
        for start in range(0, len(text), _SLICE):
            self._held += text[start : start + _SLICE]
            if self._forced and self._is_at_start and self._held.lstrip().startswith("{"):
                self._object, self._is_at_start = ToolText(OutputStyle(), forced=True), False
                self._held = "".join(self._blank) + self._held
            while self._object is None and self._read_part():
                pass
        if self._object is not None:
            text, self._held = self._held, ""
            return "", *self._object.feed(text)
        return self._take()

    def finish(self) -> tuple[str, str, list[ToolDelta]]:
        """Ends the text. Returns the reasoning, content and calls that `feed` has held back."""
        if self._object is not None:
            return "", *self._object.finish()
        if self._kind:
            self._write(self._held)
        elif not (self._in_header or self._kinds_read or self._forced):
            self._open_content()
            self._write(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> tuple[str, str, list[ToolDelta]]:
        deltas, self._deltas = merged(self._deltas), []
        texts, self._texts = self._texts, {_REASONING: "", _CONTENT: ""}
        return texts[_REASONING], texts[_CONTENT], deltas

    def _read_part(self) -> bool:
        """Reads to the end of a header or a message. Returns False if this needs more text."""
        if self._in_header:
            return self._read_header()
        return self._read_message() if self._kind else self._read_start()

    def _read_start(self) -> bool:
        begun = self._held.lstrip()
        self._blank.append(self._held[: len(self._held) - len(begun)])
        self._held = begun
        if begun.startswith(self._starts):
            self._blank.clear()
            self._in_header, self._is_at_start = True, False
            return True
        if any(mark.startswith(begun) for mark in self._starts):
            return False
        self._open_content()
        return True

    def _open_content(self) -> None:
        self._held = "".join(self._blank) + self._held
        self._blank.clear()
        self._open(_CONTENT)

    def _read_header(self) -> bool:
        header, middle, rest = self._held.partition(self._middle)
        if not middle:
            if len(header) <= _LONGEST_HEADER:
                return False
            rest, header = header, ""
        self._in_header, self._held = False, rest
        _, is_call, name = header.partition(self._tool)
        channel = header.partition(self._before)[2].split()
        if is_call and self._with_tools:
            self._open(_CALL)
            words = name.partition("<")[0].split()
            self._deltas.append(ToolDelta(self._num_calls, "", words[0] if words else ""))
            self._json = JsonDepth()
            self._num_calls += 1
        else:
            self._open(_REASONING if channel[:1] == [self._reasoning_channel] else _CONTENT)
        return True

    def _read_arguments(self, json: JsonDepth) -> bool:
        """Reads a call's JSON object, whose text never counts as a mark. Drops the rest of the
        message. Returns False if the object needs more text."""
        begun = self._held.lstrip() if self._is_empty else self._held
        if self._is_empty and begun and not begun.startswith("{"):
            self._json = None  # not an object: all text up to the next mark
            return True
        size = 0
        while size < len(begun) and (json.depth or not size):
            json.feed(begun[size])
            size += 1
        self._write(begun[:size])
        self._held = begun[size:]
        if self._is_empty or json.depth:
            return False
        self._json, self._kind = None, _REST
        return True

    def _read_message(self) -> bool:
        if self._json is not None:
            return self._read_arguments(self._json)
        ends = [(at, mark) for mark in self._ends if (at := self._held.find(mark)) >= 0]
        if not ends:
            num_held = max(overlap(self._held, mark) for mark in self._ends)
            certain = len(self._held) - num_held
            text, self._held = self._held[:certain], self._held[certain:]
            self._write(text)
            return False
        at, mark = min(ends)
        text, self._held = self._held[:at], self._held[at:]
        self._write(text)
        if self._kind == _CALL and self._is_empty:
            self._write("{}")
        self._kind, self._json = "", None
        if mark in self._ends[:2]:
            self._held = self._held.removeprefix(mark)
        return True

    def _open(self, kind: str) -> None:
        self._kind, self._is_empty, self._is_at_start = kind, True, False

    def _write(self, text: str) -> None:
        if self._kind == _CALL and self._is_empty:
            text = text.lstrip()
        if not text or self._kind == _REST:
            return
        if self._kind == _CALL:
            self._deltas.append(ToolDelta(self._num_calls - 1, text))
        elif not self._forced:
            if self._is_empty and self._kind in self._kinds_read:
                self._texts[self._kind] += _BETWEEN_MESSAGES
            self._texts[self._kind] += text
        self._is_empty = False
        self._kinds_read.add(self._kind)
