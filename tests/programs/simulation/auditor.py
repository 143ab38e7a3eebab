"""Promises about time and load, which only a world with its own clock can check.

The other promises are those of chaos (`tests/programs/chaos/audit`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.programs.chaos.audit.auditor import Snapshot, Violation
from tests.programs.chaos.audit.records import Kind, Seen, Sent
from tests.programs.simulation.loop import EPOCH

PATIENCE_SECONDS = 10.0
"""Seconds within which all requests end after the faults, and within which workers drain."""

IDLE_SECONDS = 1.0
_MOST_IDLE_COMMANDS = 30
"""Commands of a worker in `IDLE_SECONDS` without requests. It needs 15 at most."""

_MOST_SECONDS_UNSEEN = 1.0
"""Seconds in a world without faults after which a subscriber has seen an end."""
_MOST_SECONDS_OF_CANCEL = 0.5


@dataclass(slots=True)
class Stream:
    """A subscriber's record, with times of the world in seconds."""

    seen: Seen
    began_at: float
    ended_at: float | None = None
    is_cut_off: bool = False
    """Whether its process was killed before the end."""


@dataclass(slots=True)
class Timed:
    """The records of a world's clients with times."""

    streams: list[Stream] = field(default_factory=list)
    cancels: list[tuple[Sent, float]] = field(default_factory=list)
    """Requests that were cancelled, and when the client got the answer."""


def check_calm(timed: Timed, snapshot: Snapshot) -> Iterator[Violation]:
    """Checks a world without faults: leases last, ends are seen at once, and so are cancels."""
    for request_id, record in snapshot.requests.items():
        if int(record.get("attempt", 1)) > 1:
            yield Violation("lost lease", request_id, f"attempt {record['attempt']}, no fault")
    for stream in timed.streams:
        finished = finished_at(snapshot, stream.seen.request_id)
        if stream.ended_at is not None and finished is not None:
            unseen = stream.ended_at - max(finished, stream.began_at)
            if unseen > _MOST_SECONDS_UNSEEN:
                yield Violation(
                    "late end",
                    stream.seen.request_id,
                    f"its subscriber sees it {unseen:.3f} s late",
                )
    for request, at in timed.cancels:
        finished = finished_at(snapshot, request.request_id)
        if finished is not None and finished > at + _MOST_SECONDS_OF_CANCEL:
            yield Violation("late cancel", request.request_id, f"it runs for {finished - at:.3f} s")


def check_idle(num_commands: Mapping[str, int]) -> Iterator[Violation]:
    """Checks the number of commands that each worker sent in `IDLE_SECONDS` without requests."""
    for name, count in num_commands.items():
        if count > _MOST_IDLE_COMMANDS:
            yield Violation("spins", "", f"{name} sends {count} commands in {IDLE_SECONDS:g} s")


def is_cancelled_while_it_runs(request: Sent) -> bool:
    """Returns whether the first answered cancel has flagged a request that a worker holds."""
    return request.kind is Kind.CANCEL and request.cancel_status == "flagged"


def num_carried_on(streams: Iterable[Stream]) -> int:
    """Returns the number of streams with events of several attempts."""
    return sum(len({event.attempt for event in stream.seen.events}) > 1 for stream in streams)


def finished_at(snapshot: Snapshot, request_id: str) -> float | None:
    """Returns the time of the world at which a request ended; None if it has not."""
    record: Mapping[str, Any] = snapshot.requests.get(request_id, {})
    at_ms = record.get("finished_at")
    return None if at_ms is None else int(at_ms) / 1000 - EPOCH
