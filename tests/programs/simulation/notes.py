"""Records of a world that its parts write, besides the records of subscribers. Times are the
world's, in seconds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.programs.chaos.audit.records import Claimed, Sent
from tests.programs.simulation.plan import Fault

_RECOVERY_SECONDS = 5.0
_MOST_SECONDS_OF_A_CUT = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """An engine's step that has generated tokens of a request."""

    worker: str
    at: float
    num_tokens: int
    """Number of the request's tokens after the step, with those of earlier attempts."""
    begins: bool = False
    """Whether it is the first step of an attempt, or after a preemption."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that a worker got."""

    worker: str
    at: float
    claimed: Claimed


@dataclass(frozen=True, slots=True)
class DueClaim:
    """A claim at the time `at`. Since `due_at`, the worker knew that a claim might find a
    request."""

    worker: str
    due_at: float
    at: float
    num_workers: int
    """Number of workers of the queue, as far as the worker knows."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script that the server has executed for a worker."""

    worker: str
    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault that happened to a process, or to the server, from `begin` to `end`."""

    kind: Fault
    process: str
    begin: float
    end: float


@dataclass(slots=True)
class Drain:
    """A drain of a worker. `grace_seconds` is the time that running requests may still take."""

    grace_seconds: float
    begin: float
    end: float | None = None


@dataclass
class Notes:
    """Records that the parts of a world write while it runs."""

    calm_from: float | None = None
    """The time from which no fault has an effect any longer; 0 in a world without faults."""
    steps: defaultdict[str, list[Step]] = field(default_factory=lambda: defaultdict(list))
    """By request."""
    claims: list[Claim] = field(default_factory=list)
    due_claims: list[DueClaim] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    drains: dict[str, Drain] = field(default_factory=dict)
    """By worker."""
    events_per_second: dict[str, float] = field(default_factory=dict)
    """The limit of each worker."""
    over: set[tuple[str, str]] = field(default_factory=set)
    """Requests and fences of attempts whose workers have read that the attempt is over."""
    useless_rows: list[tuple[str, str]] = field(default_factory=list)
    """Attempts that a worker continued nevertheless."""
    cancels: list[tuple[Sent, float]] = field(default_factory=list)
    """Requests that were cancelled while a worker held them, and when the client got the answer."""

    def is_calm(self, at: float) -> bool:
        return self.calm_from is not None and at >= self.calm_from

    def is_disturbed(self, worker: str, begin: float, end: float) -> bool:
        """Returns whether a fault disturbs a worker or the server between two times."""
        return any(
            fault.end >= begin - _MOST_SECONDS_OF_A_CUT
            and fault.begin <= end
            and fault.process in (worker, "server")
            for fault in self.disturbances
        )

    def is_quiet(self, at: float) -> bool:
        """Returns whether, at the time `at`, only losses of messages may still have an effect."""
        return self.is_calm(at) or all(
            fault.kind is Fault.LOSE_MESSAGES or fault.end + _RECOVERY_SECONDS < at
            for fault in self.disturbances
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The history of a request, from its record on the server."""

    request_id: str
    enqueued_at: float
    first_token_at: float | None
    finished_at: float | None
    record: dict[str, Any]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that ended before the request's end."""
        history: list[dict[str, Any]] = self.record.get("history", [])
        return history
