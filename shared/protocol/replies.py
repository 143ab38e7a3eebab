"""Replies of the scripts that cancel, reprioritise, reap and sweep."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

CancelMode = Literal["any", "waiting", "flagged"]


class CancelStatus(StrEnum):
    """Reply to a cancel. `cancel.lua` explains each value."""

    CANCELLED = "cancelled"
    FLAGGED = "flagged"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"


class PriorityStatus(StrEnum):
    """Reply to a change of priority. `reprioritise.lua` explains each value."""

    CHANGED = "changed"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Reaped:
    """Numbers of requests that a reap returned to the queue, ended, made dead letters, or deleted.

    `has_more` is true if another call may find more to do.
    """

    returned: int
    ended: int
    dead: int
    purged: int
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of one page of a sweep: `num_gone` keys were removed.

    `cursor` is the argument of the next call, or "0" after the last page. `refusal` is the server's
    message if the user may not list the keys; otherwise empty.
    """

    cursor: str
    num_gone: int
    refusal: str = ""
