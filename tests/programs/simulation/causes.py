"""Checks promises that hold under faults, too: a fault must explain each crash and interruption."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from itertools import pairwise
from typing import Any

from promptq.worker.leases.prefetcher import _JITTER_SECONDS
from tests.programs.chaos.audit.auditor import Violation
from tests.programs.chaos.processes.fleet import LEASE_MS
from tests.programs.simulation.loop import EPOCH
from tests.programs.simulation.notes import Claim, Notes, Request
from tests.programs.simulation.plan import LONG_LEASE_MS, OF_SERVER, Fault

_LOSES_LEASES = {
    *(Fault.KILL, Fault.KILL_GATEWAY, Fault.KILL_JOBS),
    *(Fault.FREEZE, Fault.FREEZE_GATEWAY, Fault.FREEZE_JOBS),
    *(Fault.HOLD, Fault.REFUSE, Fault.CUT),
}
"""Faults of a worker after which its leases may end. The others cost a worker less time.

Faults of gateways and jobs concern a worker if a shrunk plan has no gateways or jobs.
"""
_RECOVERY_SECONDS = 2.5
"""Seconds after a fault until a worker has renewed its leases: it tries again after 2 s at most."""
_MOST_SECONDS_TO_STOP_CLAIMING = 0.1
_MOST_SECONDS_TO_CLAIM_AGAIN = 0.001
"""A worker claims at once. Workers that share a queue wait for a random time before."""


def check_causes(
    notes: Notes, requests: Mapping[str, Request], lease_ms: int = LEASE_MS
) -> Iterator[Violation]:
    """Yields a violation for each crash, interruption and claim in a drain that no fault explains.
    Also yields one for each worker that ignores a message or the end of its attempt."""
    claims: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in notes.claims:
        claims[claim.claimed.request_id].append(claim)
        drain = notes.drains.get(claim.worker)
        if drain and claim.at > drain.begin + _MOST_SECONDS_TO_STOP_CLAIMING:
            what = f"{claim.worker} claims it {claim.at - drain.begin:.3f} s after a drain began"
            if not _explains(notes, claim.worker, drain.begin, claim.at):
                yield Violation("claim in a drain", claim.claimed.request_id, what)
    for due in notes.due_claims:
        seconds = due.at - due.due_at
        most = _MOST_SECONDS_TO_CLAIM_AGAIN + _JITTER_SECONDS * (due.num_workers - 1)
        if seconds > most and not notes.is_disturbed(due.worker, due.due_at, due.at):
            what = f"{due.worker} claims {seconds:.3f} s after a message came"
            yield Violation("late claim", "", what)
    for request_id, _ in dict.fromkeys(notes.useless_rows):
        yield Violation("ignored answer", request_id, "a worker continues an attempt that is over")
    for request_id, request in requests.items():
        yield from _check_crashes(notes, request, lease_ms)
        yield from _check_interruptions(notes, request, claims[request_id])


def _check_crashes(notes: Notes, request: Request, lease_ms: int) -> Iterator[Violation]:
    of_server = OF_SERVER if lease_ms < LONG_LEASE_MS else frozenset()
    for past in request.attempts:
        if not past["how"].startswith("crashed"):
            continue
        worker, begin, end = _held(past)
        if not _explains(notes, worker, begin, end, of_server):
            what = f"attempt {past['attempt']} of {worker} counts as a crash, and nothing broke it"
            yield Violation("crash without a cause", request.request_id, what)


def _check_interruptions(
    notes: Notes, request: Request, claims: list[Claim]
) -> Iterator[Violation]:
    """Checks that a worker finishes the requests that it has begun, unless its time is over."""
    past = {attempt["attempt"]: attempt for attempt in request.attempts}
    claims = sorted(claims, key=lambda claim: claim.claimed.attempt)
    for before, after in pairwise(claims):
        attempt = past.get(before.claimed.attempt)
        if attempt is None or attempt["how"] != "given back":
            continue
        if after.claimed.num_tokens == before.claimed.num_tokens:
            continue
        worker, begin, end = _held(attempt)
        drain = notes.drains.get(worker)
        is_late = drain is not None and end >= drain.begin + drain.grace_seconds - 0.001
        if not is_late and not _explains(notes, worker, begin, end):
            what = f"attempt {attempt['attempt']} of {worker} returns to the queue before its end"
            yield Violation("interrupted", request.request_id, what)


def _held(attempt: dict[str, Any]) -> tuple[str, float, float]:
    """Returns the worker of an attempt that has ended, and its first and last second."""
    name = attempt["worker"].rsplit("-", 2)[0]
    return name, attempt["claimed_at"] / 1000 - EPOCH, attempt["ended_at"] / 1000 - EPOCH


def _explains(
    notes: Notes,
    worker: str,
    begin: float,
    end: float,
    of_server: Set[Fault] = OF_SERVER,
) -> bool:
    """Returns whether a fault between two times may have cost the worker its leases."""
    return any(
        fault.begin <= end
        and fault.end + _RECOVERY_SECONDS >= begin
        and (fault.kind in of_server or (fault.process == worker and fault.kind in _LOSES_LEASES))
        for fault in notes.disturbances
    )
