"""Checks that no worker reaps soon after the server was silent: other workers must renew their
leases first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from tests.programs.chaos.audit.auditor import Violation
from tests.programs.simulation.notes import Notes, Script
from tests.programs.simulation.plan import Fault

_TOLERANCE = 1.1  # clocks differ, and answers take time


def check_patience(scripts: Iterable[Script], notes: Notes, lease_ms: int) -> Iterator[Violation]:
    """Yields a violation for each reaping within half a lease after no worker reached the server
    for half a lease. A worker that was frozen, or whose bytes were held, may reap at any time."""
    patience = lease_ms / 1000 / 2
    silent_from = silent_until = -patience
    for before, after in pairwise(scripts):
        if after.at - before.at > patience * _TOLERANCE:
            silent_from, silent_until = before.at, after.at
        if after.name != "reap" or after.at - silent_until > patience / _TOLERANCE:
            continue
        if not any(
            fault.kind in (Fault.HOLD, Fault.FREEZE)
            and fault.process == after.worker
            and fault.begin <= after.at
            and fault.end >= silent_from
            for fault in notes.disturbances
        ):
            seconds = f"{after.at - silent_until:.3f} s after a silence"
            what = f"{after.worker} reaps {seconds} of {silent_until - silent_from:.3f} s"
            yield Violation("early reap", "", what)
