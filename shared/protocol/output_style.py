"""The marks with which a model family writes tool calls and reasoning."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

OBJECT, NAMED, TAGGED = "object", "named", "tagged"
ELEMENTS, LITERALS, CHANNELS = "elements", "literals", "channels"
_NEEDED: dict[str, tuple[str, ...]] = {
    OBJECT: (),
    NAMED: ("before", "middle"),
    TAGGED: ("opening", "key_before", "key_after", "value_after", "closing"),
    ELEMENTS: ("before", "key_before", "key_after", "value_after", "after"),
    LITERALS: ("middle", "key_after", "after"),
    CHANNELS: ("opening", "before", "middle", "closing", "prelude", "after"),
}
"""For each form, the marks that a style must have."""
_LONGEST_NAME = 128
_BESIDE_NAMES = ("<", "{", '"')
"""Characters that a tool's name cannot contain in most forms, because they end the name."""


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """The marks with which a model family writes calls and reasoning.

    A mark is a text, such as `<tool_call>`. White space around marks is ignored. All calls in an
    output have one form. NAME is the tool's name, and {...} are its arguments as JSON:

    - `object`: `before`, {NAME_KEY: NAME, ARGUMENTS_KEY: {...}}, `after`. The keys are the values
      of `name_key` and `arguments_key`. If `between` is set, there may be several objects,
      separated by `between`.
    - `named`: `before`, NAME, `middle`, {...}, `after`. If `name_end` is set, this mark may end the
      name, and the text from there to `middle` is ignored.
    - `elements`: `before`, NAME, `middle`, the arguments, `after`. An argument is `key_before`, its
      name, `key_after`, its value, `value_after`. If `key_after_json` is set, a value after this
      mark is JSON, and a value after `key_after` is text. If `middle` is white space, NAME ends at
      `key_before` or `after`.
    - `tagged`: like `elements`, with `opening` for `before` and `closing` for `after`.
    - `literals`: `before`, NAME, `middle`, the arguments with commas between them, `after`. An
      argument is its name, `key_after`, a literal. A string is between two `quote` marks, without
      escapes; if `quote` is empty, strings are Python's. If `before` is empty, calls are only at
      the beginning of the text, separated by `between`.
    - `channels`: the text is a sequence of messages. A message is `opening`, a role, `before`, a
      channel, `middle`, a text, `closing`. The prompt ends with the first `opening` and role, so
      the output begins after them. A message with `prelude` and NAME between the role and `middle`
      is a call: its text is {...}, and its end is `after`.

    In most forms, `opening` is before the first call and `closing` after the last one. `prelude`
    may precede a call that is not forced.

    A parser that does not know the form finds no calls. In all forms except `named`, a forced call
    (one that `tool_choice` requires) that begins with `{` is read as an object. Earlier releases
    write all forced calls as objects. This release writes a forced call as an object only if the
    form cannot express the tool's schema.
    Gateways of earlier releases know only `arguments_key`, `before` and `after`, so a forced call
    in the form `object` uses only these marks.
    """

    arguments_key: str = "arguments"
    before: str = ""
    after: str = ""
    form: str = OBJECT
    opening: str = ""
    closing: str = ""
    between: str = ""
    prelude: str = ""
    middle: str = ""
    name_end: str = ""
    key_before: str = ""
    key_after: str = ""
    key_after_json: str = ""
    value_after: str = ""
    quote: str = ""
    reasoning_before: str = ""
    """Mark before the reasoning that begins an output; empty if the model never reasons."""
    reasoning_after: str = ""
    name_key: str = "name"
    without_tools: OutputStyle | None = None
    """Style of a chat without tools; None if this style serves too. Some models render such a chat
    with another template, which writes reasoning in a different way."""

    def of_chat(self, *, with_tools: bool) -> OutputStyle:
        """Returns the style for a chat with or without tools."""
        return self if with_tools else self.without_tools or self

    @property
    def has_calls(self) -> bool:
        """Whether this release can read calls: `form` is known and the form's marks are set."""
        needed = _NEEDED.get(self.form)
        return needed is not None and all(getattr(self, name).strip() for name in needed)

    def can_name(self, name: str) -> bool:
        """Returns whether a parser of this style can read a call of a tool with this name."""
        if self.form == OBJECT:
            return True
        if self.form in (CHANNELS, LITERALS):
            return re.fullmatch(r"[\w.-]+", name) is not None and len(name) <= _LONGEST_NAME
        marks = [mark for mark in (self.middle.strip(), self.name_end.strip()) if mark]
        is_text = name.isprintable() and name == name.strip() and 0 < len(name) <= _LONGEST_NAME
        return is_text and not any(mark in name for mark in (*_BESIDE_NAMES, *marks))

    @property
    def has_pairs(self) -> bool:
        """Whether a call's arguments are pairs of name and value, instead of one JSON object."""
        return self.form in (TAGGED, ELEMENTS, LITERALS)

    @property
    def as_elements(self) -> OutputStyle:
        """This style with the form `elements` instead of `tagged`; any other style unchanged."""
        if self.form != TAGGED:
            return self
        return replace(
            self, form=ELEMENTS, before=self.opening, after=self.closing, opening="", closing=""
        )

    @property
    def call_marks(self) -> tuple[str, ...]:
        """All non-empty marks of calls, such as `<tool_call>`."""
        ours = (self.before, self.after, self.opening, self.closing, self.between, self.prelude)
        keys = (self.key_before, self.key_after, self.key_after_json)
        rest = (self.middle, self.name_end, *keys, self.value_after, self.quote)
        return tuple(mark for mark in (*ours, *rest) if mark)

    @property
    def reasoning_marks(self) -> tuple[str, ...]:
        """The marks before and after the reasoning; empty if the model never reasons."""
        marks = (self.reasoning_before, self.reasoning_after)
        return marks if all(marks) else ()

    def to_json(self) -> str:
        """Returns the JSON that the queue's key `model` stores."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> OutputStyle | None:
        """Returns the style in a JSON text; None if there is no style. Ignores unknown fields."""
        try:
            marks = json.loads(text)
        except (ValueError, RecursionError):
            return None
        style = cls._read(marks)
        if style is None or (other := cls._read(marks.get("without_tools"))) is None:
            return style
        return replace(style, without_tools=other)

    @classmethod
    def _read(cls, marks: Any) -> OutputStyle | None:
        if not isinstance(marks, dict) or not {"arguments_key", "before", "after"} <= marks.keys():
            return None
        names = [field.name for field in fields(cls) if field.name != "without_tools"]
        known = {name: marks[name] for name in names if name in marks}
        return cls(**known) if all(isinstance(mark, str) for mark in known.values()) else None
