"""What becomes of a cancel, a new priority, a reaping and a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

CancelMode = Literal["any", "waiting", "flagged"]


class CancelStatus(StrEnum):
    CANCELLED = "cancelled"
    FLAGGED = "flagged"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"


class PriorityStatus(StrEnum):
    """What became of a wish for another priority; the script's header says when."""

    CHANGED = "changed"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many requests a call brought back, ended, buried and deleted.

    `has_more`: there may be more to be done than one call does.
    """

    returned: int
    ended: int
    dead: int
    purged: int
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """`cursor` is where the next call goes on, "0" if that was the last page of keys.

    `refusal` is what the server says if it does not let this user see what keys there are.
    """

    cursor: str
    num_gone: int
    refusal: str = ""
