"""How a model family writes a tool call."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """A call is `before`, then {"name": NAME, ARGUMENTS_KEY: {...}}, then `after`."""

    arguments_key: str = "arguments"
    before: str = ""
    after: str = ""

    def to_json(self) -> str:
        """The form in the queue's key `model`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ToolCallStyle | None:
        """Returns None if the text is not a style."""
        try:
            fields = json.loads(text)
            style = cls(fields["arguments_key"], fields["before"], fields["after"])
        except (ValueError, TypeError, KeyError):
            return None
        return style if all(isinstance(it, str) for it in asdict(style).values()) else None
