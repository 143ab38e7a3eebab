"""Rows, each with one event to publish, and their statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from promptq.shared.protocol.events import TokenEvent


class Row(NamedTuple):
    """One event to publish, as JSON; `finish_reason` and `result_json` go with a last event.

    The event has the tokens from `start` to `end`. The fields are the script's arguments, in order.
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
        """The row that sends `event`."""
        reason = event.finish_reason or ""
        return cls(request_id, fence, event.index, event.end, event.to_json(), reason, result_json)


class RowStatus(StrEnum):
    """The status of a published row or a held id. The script's header explains each."""

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
        """Whether this worker may no longer run the request."""
        return self not in (RowStatus.OK, RowStatus.DUPLICATE)


@dataclass(frozen=True, slots=True)
class Published:
    """Statuses in the order of the call's rows and held ids."""

    rows: list[RowStatus]
    held: list[RowStatus]
