"""Tool calls as OpenAI's clients get them, found in the text that a model writes.

The search reads letter by letter. Its result depends only on the text, not on the pieces in which
the text came. So a stream that is read again gives the same chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from pydantic_core import from_json

from promptq.producer.calls.output.tagged_arguments import TaggedArguments
from promptq.shared.protocol.output_style import NAMED, TAGGED, OutputStyle

_STRING, _NAME = "", "\0"
"""Stand for the tool's name in a head, among literals: as a JSON string, and up to a mark."""

_HALF_CHARACTER = "\ufffd"
_LONGEST_NAME, _LONGEST_MARK = 256, 256
"""In letters, with white space. A longer text is content."""

_index = attrgetter("index")

ParameterTypes = Mapping[str, Mapping[str, frozenset[str]]]
"""For each tool and parameter the JSON types that its schema names; empty: any."""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """One more piece of call `index`. The first piece has the `name`."""

    index: int
    arguments: str
    name: str | None = None


class ToolText:
    """Separates calls from the text around them.

    If a call is `forced`, the whole text is one call, and even a part of it is never content.
    """

    def __init__(
        self, style: OutputStyle, *, forced: bool = False, types: ParameterTypes | None = None
    ) -> None:
        style = style.forced if forced else style
        self.num_calls = 0
        self._forced, self._types = forced, types or {}
        self._is_object, self._is_tagged = style.form not in (NAMED, TAGGED), style.form == TAGGED
        self._before, self._after = _squeezed(style.before), _squeezed(style.after)
        self._between, self._closing = _squeezed(style.between), _squeezed(style.closing)
        self._name_key, self._arguments_key = style.name_key, style.arguments_key
        self._middle, self._name_end = _squeezed(style.middle), _squeezed(style.name_end)
        opening, prelude = _squeezed(style.opening), _squeezed(style.prelude)
        if self._is_tagged:
            self._head, starts = (_NAME,), {opening: 0}
            self._tags = (style.key_before, style.key_after, style.value_after, style.closing)
        else:
            key = json.dumps(self._arguments_key)
            of_object = ("{", json.dumps(self._name_key), ":", _STRING, ",", key, ":", "{")
            self._head = (self._before, *(of_object if self._is_object else (_NAME, "{")))
            starts = {self._before: 1, opening: 0, prelude: 0}
        self._starts = {mark: element for mark, element in starts.items() if mark}
        """The marks that begin a call, and which element of the head comes next."""
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self._held = ""  # text that may still turn out to be a call
        self._object: list[str] = []  # a call whose members come in another order
        self._element, self._matched, self._name, self._opened_at = 0, "", "", 0
        self._dense = ""  # what is matched, without white space
        self._depth, self._in_string, self._escaped = 0, False, False
        self._arguments: TaggedArguments | None = None
        self._state: Callable[[str], None] = self._in_content
        # Without marks, a text that begins with a call has one.
        self._is_at_start = self._is_object and not self._before and not opening
        if self._is_at_start:
            self._expect(0)

    def feed(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Reads more text. Returns the content and the pieces of calls that are certain now."""
        for letter in text:
            if letter == _HALF_CHARACTER and self._forced and self._state != self._in_arguments:
                continue  # a mark was cut
            self._state(letter)
        return self._take()

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """Ends the text. Returns the part that was held back."""
        if self._forced:
            if self._state == self._in_head and self._name and not self.num_calls:
                self._begin_call("")
        elif self._state in (self._in_content, self._in_head):
            self._content.append(self._held if self._held.strip() or not self.num_calls else "")
        elif self._state == self._in_whole_object:
            self._content += [self._held, *self._object]
        self._held = ""
        return self._take()

    def _take(self) -> tuple[str, list[ToolDelta]]:
        content, deltas = "".join(self._content), merged(self._deltas)
        self._content, self._deltas = [], []
        return content, deltas

    def _in_content(self, letter: str) -> None:
        self._held += letter
        while self._held:
            if len(self._held) <= _LONGEST_MARK:
                if self._held.isspace() and self.num_calls:
                    return  # between two calls
                if (squeezed := self._mark_begun()) in self._starts:
                    self._expect(self._starts[squeezed])
                    return
                if squeezed and self.num_calls and squeezed == self._closing:
                    self._held = ""
                    return
                marks = (*self._starts, self._closing if self.num_calls else "")
                if squeezed and any(mark.startswith(squeezed) for mark in marks):
                    return
            self._content.append(self._held[0])
            self._held = self._held[1:]

    def _mark_begun(self) -> str:
        """Returns the held text if it may begin a mark.

        White space before the mark counts only after a call.
        """
        return "" if self._held[0].isspace() and not self.num_calls else _squeezed(self._held)

    def _in_plain(self, letter: str) -> None:
        self._content.append(letter)

    def _expect(self, element: int) -> None:
        """A call begins with this element of its head."""
        self._element = element if self._head[element] else element + 1
        self._matched = self._dense = self._name = ""
        self._state = self._in_head

    def _in_head(self, letter: str) -> None:
        self._held += letter
        literal = self._head[self._element]
        if not self._matched and letter.isspace():
            return
        if literal == _NAME:
            self._in_name(letter)
        elif literal == _STRING:
            self._in_quoted_name(letter)
        elif not letter.isspace():
            self._matched += letter
            if not literal.startswith(self._matched):
                self._no_call()
            elif literal == self._matched:
                self._next_element()

    def _in_quoted_name(self, letter: str) -> None:
        self._matched += letter
        if not self._matched.startswith('"') or len(self._matched) > _LONGEST_NAME:
            self._no_call()
        elif len(self._matched) > 1 and letter == '"' and not _escapes(self._matched[:-1]):
            try:
                self._name = str(json.loads(self._matched))
            except ValueError:
                self._no_call()
            else:
                self._next_element()

    def _in_name(self, letter: str) -> None:
        self._matched += letter
        self._dense += "" if letter.isspace() else letter
        is_over = self._dense.endswith(self._middle)
        mark = self._middle if is_over else self._name_end
        if mark and not self._name and self._dense.endswith(mark):
            self._name = _without(self._matched, mark)
        if is_over and self._name:
            self._next_element()
        elif is_over or letter in '{"' or len(self._matched) > _LONGEST_NAME:
            self._no_call()

    def _next_element(self) -> None:
        self._matched = self._dense = ""
        self._element += 1
        if self._element == 2:
            self._opened_at = len(self._held) - 1
        if self._element == len(self._head):
            self._begin_call("" if self._is_tagged else "{")

    def _no_call(self) -> None:
        """The text only looked like a call. Another one may begin behind its first letter.

        Members of an object that come in another order are read once the object is whole.
        """
        held, self._held = self._held, ""
        if self._is_object and self._before and self._element > 1 and not self._forced:
            self._held, self._object = held[: self._opened_at], []
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._in_whole_object
            for letter in held[self._opened_at :]:
                self._state(letter)
            return
        num_read = 0 if self._is_at_start else 1
        self._is_at_start = False
        self._content.append(held[:num_read])
        self._read_again(held[num_read:])

    def _read_again(self, text: str) -> None:
        has_marks = self._starts or self._closing
        self._state = self._in_content if has_marks else self._in_plain
        for letter in text:
            self._state(letter)

    def _begin_call(self, arguments: str) -> None:
        self._held, self._is_at_start = "", False
        self._deltas.append(ToolDelta(self.num_calls, arguments, self._name))
        self.num_calls += 1
        self._depth, self._in_string, self._escaped = 1, False, False
        self._state = self._in_arguments
        if self._is_tagged:
            self._arguments = TaggedArguments(self._tags, self._types.get(self._name, {}))
            self._state = self._in_tags

    def _in_tags(self, letter: str) -> None:
        assert self._arguments is not None
        if json_text := self._arguments.feed(letter):
            self._deltas.append(ToolDelta(self.num_calls - 1, json_text))
        if self._arguments.are_over:
            self._state = self._in_content

    def _in_arguments(self, letter: str) -> None:
        self._deltas.append(ToolDelta(self.num_calls - 1, letter))
        self._read_json(letter)
        if self._depth == 0:
            self._depth = 1
            self._state = self._in_object if self._is_object else self._in_tail

    def _in_object(self, letter: str) -> None:
        """Skip what follows the arguments inside of their object."""
        self._read_json(letter)
        if self._depth == 0:
            self._state = self._in_tail

    def _in_whole_object(self, letter: str) -> None:
        self._object.append(letter)
        self._read_json(letter)
        if self._depth:
            return
        held, self._held = self._held, ""
        text, self._object = "".join(self._object), []
        name, arguments = self._call_of(text)
        if name is None:
            self._content.append(held + text)
            self._state = self._in_content
            return
        self._deltas.append(
            ToolDelta(self.num_calls, json.dumps(arguments, ensure_ascii=False), name)
        )
        self.num_calls += 1
        self._depth = 1
        self._state = self._in_tail

    def _call_of(self, text: str) -> tuple[str | None, Any]:
        """Returns the name and the arguments of a call that is a JSON object; no name for none."""
        try:
            call = from_json(text, allow_inf_nan=False)
            arguments = call.get(self._arguments_key)
            if isinstance(arguments, str):
                arguments = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            return None, None
        arguments = {} if arguments is None else arguments
        name = call.get(self._name_key)
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        return (name if is_call else None), arguments

    def _read_json(self, letter: str) -> None:
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

    def _in_tail(self, letter: str) -> None:
        """A call is over. Another one follows, or the mark after it."""
        self._held += letter
        squeezed = _squeezed(self._held)
        if self._between and squeezed == self._between:
            self._expect(1)
        elif len(self._held) <= _LONGEST_MARK and self._may_be_between(squeezed):
            return
        elif not self._after:
            held, self._held = self._held, ""
            self._read_again(held)
        else:
            self._held, self._dense = "", ""
            self._state = self._up_to_after
            for each in squeezed:
                self._state(each)

    def _may_be_between(self, squeezed: str) -> bool:
        return bool(self._between) and self._between.startswith(squeezed)

    def _up_to_after(self, letter: str) -> None:
        """Skip everything up to the mark after the call, or to the next call."""
        if letter.isspace():
            return
        self._dense = (self._dense + letter)[-_LONGEST_MARK:]
        if self._dense.endswith(self._after):
            self._read_again("")
        elif self._before and self._dense.endswith(self._before):
            self._expect(1)


def call_id(request_id: str, index: int) -> str:
    """The id of a request's call, the same for each reader."""
    digest = hashlib.sha256(f"{request_id}\n{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def chat_call(request_id: str, delta: ToolDelta) -> dict[str, Any]:
    """A call that begins with this delta, as in a message of the OpenAI API."""
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": call_id(request_id, delta.index), "type": "function", "function": function}


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _without(text: str, mark: str) -> str:
    """The text before the mark at its end, whose white space does not count."""
    for letter in reversed(mark):
        text = text.rstrip().removesuffix(letter)
    return text.strip()


def _escapes(text: str) -> bool:
    """Whether the next letter is escaped, by an odd number of backslashes."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def merged(deltas: list[ToolDelta]) -> list[ToolDelta]:
    """The deltas, joined to one for each call."""
    return [
        ToolDelta(index, "".join(delta.arguments for delta in of_one), of_one[0].name)
        for index, of_one in ((index, list(group)) for index, group in groupby(deltas, _index))
    ]
