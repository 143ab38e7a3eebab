"""Rows (events to publish) and their statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from promptq.shared.protocol.events import TokenEvent


class Row(NamedTuple):
    """One event to publish. The fields are the arguments of the script `publish`, in order.

    The event has the output tokens from number `start`, counted from 0, up to but not including
    `end`. Only a request's last event has `finish_reason` and `result_json`.
    """

    request_id: str
    fence: str
    start: int
    end: int
    event_json: str
    finish_reason: str = ""
    result_json: str = ""

    @classmethod
    def of(cls, request_id: str, fence: str, event: TokenEvent, result_json: str = "") -> Row:
        """Returns the row for an event. Pass `result_json` with the request's last event only."""
        reason = event.finish_reason or ""
        return cls(request_id, fence, event.index, event.end, event.to_json(), reason, result_json)


class RowStatus(StrEnum):
    """Status of a published row or a held id. `publish.lua` explains each value."""

    OK = "ok"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FINISHED = "finished"
    FENCED = "fenced"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"

    @property
    def is_lost(self) -> bool:
        """Whether the worker must stop the request: the row or the lease was refused."""
        return self not in (RowStatus.OK, RowStatus.DUPLICATE)


@dataclass(frozen=True, slots=True)
class Published:
    """Reply to `publish`: a status for each row and each held request, in the call's order."""

    rows: list[RowStatus]
    held: list[RowStatus]
