"""Ids of a stream's events. An event's id states how much of the stream a client has read after
this event.

`chatcmpl-ID/12-57` means that the call has one choice, of which the client has read 12 tokens (57
characters). An `e` after the numbers means that the client has read the choice's end, too. The
positions in further choices follow, separated by dots. The number of characters is needed when the
queue has deleted the events: the request's result does not show where tokens begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from promptq.producer.calls.call_body import wrong_field

_SEPARATOR = "/"
_CHOICE = re.compile(r"(\d{1,9})-(\d{1,9})(e?)")


@dataclass(frozen=True, slots=True)
class Position:
    """Numbers of tokens and characters of a choice that a client has read. With `ended`, the client
    has also read the choice's end."""

    tokens: int = 0
    chars: int = 0
    ended: bool = False

    @property
    def is_start(self) -> bool:
        return self.tokens == 0 and not self.ended

    def __str__(self) -> str:
        return f"{self.tokens}-{self.chars}{'e' if self.ended else ''}"


def event_id(completion_id: str, positions: Iterable[str]) -> str:
    """Returns an event's id. `positions` has one position for each choice: how much of the choice a
    client has read after this event."""
    return f"{completion_id}{_SEPARATOR}{'.'.join(positions)}"


def read_event_id(text: str) -> tuple[str, list[Position]]:
    """Returns a completion's id and the positions in an event's id. Raises InvalidRequestError."""
    completion_id, _, rest = text.strip().rpartition(_SEPARATOR)
    matches = [_CHOICE.fullmatch(part) for part in rest.split(".")]
    if not completion_id or None in matches:
        raise wrong_field("Last-Event-ID", f"{text[:200]!r} is not the id of an event of a stream")
    positions = [Position(int(each[1]), int(each[2]), bool(each[3])) for each in matches if each]
    return completion_id, positions
