"""How a model family writes what is not content: calls of tools, and its reasoning."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace

OBJECT, NAMED, TAGGED = "object", "named", "tagged"


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """The marks in a model's text. White space in and around marks does not count when reading.

    A text has calls of one of three forms. NAME is the name of the tool, {...} its arguments:

    - `object`: `before`, then {"name": NAME, ARGUMENTS_KEY: {...}}, then `after`. With `between`,
      several objects may stand there.
    - `named`: `before`, NAME, `middle`, {...}, `after`. With `name_end`, the name may end there
      already, and what follows up to `middle` does not count.
    - `tagged`: `opening`, NAME, `middle`, then for each argument `key_before`, its name,
      `key_after`, its value and `value_after`, and at the end `closing`.

    In the first two forms `opening` stands before the first call and `closing` after the last. A
    `prelude` may stand before a call that the model makes by itself.

    A reader that does not know the form finds no calls. Gateways of earlier releases know
    `arguments_key`, `before` and `after` alone, so a forced call in the form `object` is written
    with these.
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
    value_after: str = ""
    reasoning_before: str = ""
    """Stands before the reasoning, which comes first; empty if the model never reasons."""
    reasoning_after: str = ""

    @property
    def has_calls(self) -> bool:
        """Whether the form is one that is known here."""
        return self.form in (OBJECT, NAMED, TAGGED)

    @property
    def forced(self) -> OutputStyle:
        """The style of a call that a grammar forces, which is never tagged."""
        return replace(self, form=OBJECT, opening="", closing="") if self.form == TAGGED else self

    @property
    def call_marks(self) -> tuple[str, ...]:
        """All marks of calls."""
        ours = (self.before, self.after, self.opening, self.closing, self.between, self.prelude)
        rest = (self.middle, self.name_end, self.key_before, self.key_after, self.value_after)
        return tuple(mark for mark in (*ours, *rest) if mark)

    @property
    def reasoning_marks(self) -> tuple[str, ...]:
        """Both marks of reasoning; none if the model never reasons."""
        marks = (self.reasoning_before, self.reasoning_after)
        return marks if all(marks) else ()

    def to_json(self) -> str:
        """The form in the queue's key `model`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> OutputStyle | None:
        """Returns None if the text is not a style. Fields that are not known are ignored."""
        try:
            given = json.loads(text)
            known = {it.name: given[it.name] for it in fields(cls) if it.name in given}
            style = cls(**known)
        except (ValueError, TypeError, RecursionError):
            return None
        if not {"arguments_key", "before", "after"} <= known.keys():
            return None
        return style if all(isinstance(it, str) for it in known.values()) else None
