"""The replies to a cancel, a change of priority, a reaping and a sweep."""

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
    """The reply to a change of priority. The script's header explains each."""

    CHANGED = "changed"
    ACTIVE = "active"
    FINISHED = "finished"
    UNKNOWN = "unknown"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Reaped:
    """Numbers of requests that a call returned to waiting, ended, made dead letters, and deleted.

    `has_more`: another call may find more to do.
    """

    returned: int
    ended: int
    dead: int
    purged: int
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """`cursor` is where the next call continues, or "0" after the last page of keys.

    `refusal` is the server's message if it does not let this user list the keys.
    """

    cursor: str
    num_gone: int
    refusal: str = ""
