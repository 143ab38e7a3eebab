"""Finds calls of tools in a model's text.

The parser reads single characters, so it does not matter where the text was divided.
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

from promptq.producer.calls.output.json_depth import JsonDepth
from promptq.producer.calls.output.literal_arguments import LiteralArguments
from promptq.producer.calls.output.marks import squeezed, without
from promptq.producer.calls.output.tagged_arguments import TaggedArguments
from promptq.shared.protocol.output_style import ELEMENTS, LITERALS, NAMED, TAGGED, OutputStyle

_STRING, _NAME, _FIRST_KEY = "", "\0", "\1"
"""Special elements of a call's head, which is the text before the arguments. `_STRING` stands for
the tool's name as a JSON string, `_NAME` for the name up to a mark, and `_FIRST_KEY` for the first
argument's name or the mark that ends the call. Other elements are literal text."""

_HALF_CHARACTER = "\ufffd"
_LONGEST_NAME, _LONGEST_MARK = 256, 256
"""The most characters of a tool's name and of a mark, with white space. Longer text is content."""

_index = attrgetter("index")

ParameterTypes = Mapping[str, Mapping[str, frozenset[str]]]
"""The JSON types that a schema allows, by tool and parameter. An empty set allows any type."""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of tool call number `index` (from 0). A call's first piece has the tool's `name`."""

    index: int
    arguments: str
    name: str | None = None


class ToolText:
    """Parser that separates tool calls from the text around them, which is content. If a call is
    `forced`, the whole text is one call."""

    def __init__(
        self, style: OutputStyle, *, forced: bool = False, types: ParameterTypes | None = None
    ) -> None:
        self.num_calls = 0
        self._forced, self._types = forced, types or {}
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self._held = ""  # text that may still turn out to be a call
        self._blank: list[str] = []  # white space after `_held`
        self._follows_call = False  # whether only white space came after a call
        self._object: list[str] = []  # an object that may be a call in an unusual order of members
        self._element, self._matched, self._name, self._opened_at = 0, "", "", 0
        self._dense = ""  # the matched text without white space
        self._json = JsonDepth()
        self._arguments: TaggedArguments | LiteralArguments | None = None
        self._state: Callable[[str], None] = self._in_content
        self._take_style(style)
        if forced and style.has_pairs:
            self._state = self._at_forced

    def _take_style(self, style: OutputStyle) -> None:
        self._in_lines = style.form == TAGGED or style.key_after.endswith("\n")
        self._style = style = style.as_elements
        self._is_object = style.form not in (NAMED, ELEMENTS, LITERALS)
        self._before, self._after = squeezed(style.before), squeezed(style.after)
        self._between, self._closing = squeezed(style.between), squeezed(style.closing)
        self._name_key, self._arguments_key = style.name_key, style.arguments_key
        self._name_ends, self._name_end = [squeezed(style.middle)], squeezed(style.name_end)
        opening, self._prelude = squeezed(style.opening), squeezed(style.prelude)
        starts = {self._before: 1, opening: 0, self._prelude: 0}
        if style.form == LITERALS and not self._before:
            # Only the first argument distinguishes a call from other text.
            self._head: tuple[str, ...] = (opening, _NAME, _FIRST_KEY)
            del starts[opening]
        elif style.has_pairs:
            self._head = (self._before, _NAME)
        else:
            key = json.dumps(self._arguments_key)
            of_object = ("{", json.dumps(self._name_key), ":", _STRING, ",", key, ":", "{")
            self._head = (self._before, *(of_object if self._is_object else (_NAME, "{")))
        if style.has_pairs:  # the parser of the arguments reads the mark after the call
            if not self._name_ends[0]:
                self._name_ends = [squeezed(style.key_before), self._after]
            self._after = self._after[1:] if style.form == LITERALS else ""
        self._starts = {mark: element for mark, element in starts.items() if mark}
        """Maps each mark that may begin a call to the index of the head's element that follows."""
        # Without marks, only a text that begins with a call contains calls.
        self._is_bare = not self._before and (
            style.form == LITERALS or (self._is_object and not opening)
        )
        self._is_at_start = self._is_bare
        if self._is_at_start:
            self._expect(0)

    def feed(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Reads more text. Returns new content and pieces of calls. Holds back text that may begin
        a mark."""
        for letter in text:
            if (
                letter == _HALF_CHARACTER
                and self._forced
                and self._state not in (self._in_arguments, self._in_pairs)
            ):
                continue  # it comes from a mark that was cut off
            self._state(letter)
        return self._take()

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """Ends the text. Returns the content and the pieces of calls that `feed` has held back."""
        self._hold_blank()
        if self._forced:
            if self._state == self._in_head and self._name and not self.num_calls:
                self._begin_call("")
        elif self._state in (self._in_content, self._in_head):
            is_text = not self.num_calls or squeezed(self._held) not in ("", self._prelude)
            self._content.append(self._held if is_text else "")
        elif self._state == self._in_whole_object:
            self._content += [self._held, *self._object]
        self._held = ""
        return self._take()

    def _take(self) -> tuple[str, list[ToolDelta]]:
        content, deltas = "".join(self._content), merged(self._deltas)
        self._content, self._deltas = [], []
        return content, deltas

    def _at_forced(self, letter: str) -> None:
        """Begins a forced call: in the style's form, or as a JSON object (see `OutputStyle`)."""
        if letter.isspace():
            return
        self._read_again("")
        if letter == "{":
            self._take_style(OutputStyle())
        elif self._is_at_start:
            self._expect(0)
        self._state(letter)

    def _in_content(self, letter: str) -> None:
        self._held += letter
        if letter == "{" and self._follows_call and self._is_bare and self._held.strip() == "{":
            self._held = self._held[:-1]  # this object may be another call
            self._expect(0)
            self._state(letter)
            return
        while self._held:
            if len(self._held) <= _LONGEST_MARK:
                if self._held.isspace() and self.num_calls:
                    return  # between two calls
                if (begun := self._mark_begun()) in self._starts:
                    self._expect(self._starts[begun])
                    return
                if begun and self.num_calls and begun == self._closing:
                    self._held = ""
                    return
                marks = (*self._starts, self._closing if self.num_calls else "")
                if begun and any(mark.startswith(begun) for mark in marks):
                    return
            self._content.append(self._held[0])
            self._held = self._held[1:]
            self._follows_call = False

    def _mark_begun(self) -> str:
        """Returns the held text without white space, because the text may begin a mark. Returns ''
        if the text begins with white space before the first call, where white space is content."""
        return "" if self._held[0].isspace() and not self.num_calls else squeezed(self._held)

    def _in_plain(self, letter: str) -> None:
        self._content.append(letter)

    def _expect(self, element: int) -> None:
        """Begins to read a call's head (the text before its arguments) at this element."""
        self._element = element if self._head[element] else element + 1
        self._matched = self._dense = self._name = ""
        self._state = self._in_head

    def _in_head(self, letter: str) -> None:
        if not self._matched and letter.isspace():
            self._blank.append(letter)
            return
        self._hold_blank()
        self._held += letter
        literal = self._head[self._element]
        if literal == _NAME:
            self._in_name(letter)
        elif literal == _STRING:
            self._in_quoted_name(letter)
        elif literal == _FIRST_KEY:
            self._in_first_key(letter)
        elif not letter.isspace():
            self._matched += letter
            if not literal.startswith(self._matched):
                self._no_call()
            elif literal == self._matched:
                self._next_element()

    def _hold_blank(self) -> None:
        self._held += "".join(self._blank)
        self._blank.clear()

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
        end = next((mark for mark in self._name_ends if mark and self._dense.endswith(mark)), "")
        mark = end or self._name_end
        if mark and not self._name and self._dense.endswith(mark):
            self._name = without(self._matched, mark)
        of_mark = any(letter in mark for mark in self._name_ends)
        is_word = letter.isalnum() or letter in "_-." or not (self._is_bare or letter in '{"')
        if end and self._name:
            self._next_element(end if end not in squeezed(self._style.middle) else "")
        elif (
            end
            or not (is_word or of_mark)
            or len(self._matched) > _LONGEST_NAME
            or (self._before and self._dense.endswith(self._before))  # there another call begins
        ):
            self._no_call()

    def _in_first_key(self, letter: str) -> None:
        self._matched += letter
        word, key_after = self._matched.strip(), self._style.key_after.strip()
        is_key = word.endswith(key_after) and word.removesuffix(key_after).rstrip().isidentifier()
        if is_key or word == self._style.after.strip()[0]:
            self._next_element(self._matched)
        elif not word.isidentifier() or len(self._matched) > _LONGEST_NAME:
            self._no_call()

    def _next_element(self, argument: str = "") -> None:
        """Goes to the next element of a call's head. `argument` was already read."""
        self._matched = self._dense = ""
        self._element += 1
        if self._element == 2:
            self._opened_at = len(self._held) - 1
        if self._element == len(self._head):
            self._begin_call("" if self._style.has_pairs else "{")
            for letter in argument:
                self._state(letter)

    def _no_call(self) -> None:
        """Handles held text that is no head of a call. A call may begin later in this text. An
        object that has begun is read to its end: it may be a call with another order of members."""
        held, self._held = self._held, ""
        if self._is_object and self._before and self._element > 1 and not self._forced:
            self._held, self._object = held[: self._opened_at], []
            self._json = JsonDepth()
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
        self._held, self._is_at_start, self._follows_call = "", False, True
        self._deltas.append(ToolDelta(self.num_calls, arguments, self._name))
        self.num_calls += 1
        self._json = JsonDepth(1)
        self._state = self._in_arguments
        if self._style.has_pairs:
            types = self._types.get(self._name, {})
            if self._style.form == LITERALS:
                self._arguments = LiteralArguments(self._style, types)
            else:
                self._arguments = TaggedArguments(self._style, types, in_lines=self._in_lines)
            self._state = self._in_pairs

    def _in_pairs(self, letter: str) -> None:
        assert self._arguments is not None
        if json_text := self._arguments.feed(letter):
            self._deltas.append(ToolDelta(self.num_calls - 1, json_text))
        if self._arguments.are_over:
            self._state = self._in_tail

    def _in_arguments(self, letter: str) -> None:
        self._deltas.append(ToolDelta(self.num_calls - 1, letter))
        self._json.feed(letter)
        if self._json.depth == 0:
            self._json.depth = 1
            self._state = self._in_object if self._is_object else self._in_tail

    def _in_object(self, letter: str) -> None:
        self._json.feed(letter)
        if self._json.depth == 0:
            self._state = self._in_tail

    def _in_whole_object(self, letter: str) -> None:
        self._object.append(letter)
        self._json.feed(letter)
        if self._json.depth:
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
        self._json.depth = 1
        self._state = self._in_tail

    def _call_of(self, text: str) -> tuple[str | None, Any]:
        """Returns the name and the arguments of the call in a JSON object. The name is None if the
        object is no call."""
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

    def _in_tail(self, letter: str) -> None:
        """Reads the text after a call's arguments: the mark after the call, or the next call."""
        self._held += letter
        end = squeezed(self._held)
        if self._between and end == self._between:
            self._expect(1)
        elif self._between and self._between.startswith(end) and len(self._held) <= _LONGEST_MARK:
            return
        elif not self._after:
            held, self._held = self._held, ""
            self._read_again(held)
        else:
            self._held, self._dense = "", ""
            self._state = self._up_to_after
            for each in end:
                self._state(each)

    def _up_to_after(self, letter: str) -> None:
        """Skips the text up to the mark that ends the call (`_after`), or up to the next call."""
        if letter.isspace():
            return
        self._dense = (self._dense + letter)[-_LONGEST_MARK:]
        if self._dense.endswith(self._after):
            self._read_again("")
        elif self._before and self._dense.endswith(self._before):
            self._expect(1)


def call_id(request_id: str, index: int) -> str:
    """Returns the id of a request's tool call number `index`. All readers get the same id."""
    digest = hashlib.sha256(f"{request_id}\n{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def chat_call(request_id: str, delta: ToolDelta) -> dict[str, Any]:
    """Returns a tool call in the form of OpenAI's API, from the first delta of the call."""
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": call_id(request_id, delta.index), "type": "function", "function": function}


def _escapes(text: str) -> bool:
    """Returns whether the text ends in an odd number of backslashes, so that the next character is
    escaped."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def merged(deltas: list[ToolDelta]) -> list[ToolDelta]:
    """Joins successive deltas of the same tool call."""
    return [
        ToolDelta(index, "".join(delta.arguments for delta in of_one), of_one[0].name)
        for index, of_one in ((index, list(group)) for index, group in groupby(deltas, _index))
    ]
