"""Checks the leaders of `promptq jobs`: one at a time, and upkeep goes on after one has died."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.programs.chaos.audit.auditor import Violation

SETTLE_SECONDS = 12.0
"""Seconds after the faults within which upkeep has run again."""
_MOST_SECONDS_OLD = 8.0
"""Seconds since the last upkeep at the end. It runs each 5 seconds."""


@dataclass(frozen=True, slots=True)
class Hold:
    """An answered call that takes, renews or releases a lease. `at` is the world's time."""

    process: str
    holder: str
    ttl_ms: int
    has_worked: bool
    at: float


def check_leaders(holds: Iterable[Hold]) -> Iterator[Violation]:
    """Yields a violation for each time at which a leader begins while another process leads."""
    leader, until = "", 0.0
    for hold in holds:
        if not hold.has_worked:
            continue
        if hold.ttl_ms == 0:
            leader = ""
            continue
        if leader not in ("", hold.holder) and hold.at < until - 0.002:
            yield Violation(
                "two leaders",
                "",
                f"{hold.holder} leads at {hold.at:.3f}, {leader} until {until:.3f}",
            )
        leader, until = hold.holder, hold.at + hold.ttl_ms / 1000


def check_acts(holds: Iterable[Hold], acts: Iterable[tuple[str, float]]) -> Iterator[Violation]:
    """Checks that each process that enqueued upkeep was the leader at that time, in a world without
    faults.

    `acts` has the name of the process and the time of each call that enqueued upkeep.
    """
    led = [hold for hold in holds if hold.has_worked]
    for process, at in acts:
        leads = any(
            hold.process == process and hold.at <= at <= hold.at + hold.ttl_ms / 1000
            for hold in led
        )
        if not leads:
            yield Violation("acts without lead", "", f"{process} enqueues upkeep at {at:.3f}")


def check_upkeep(seen_at: float | None, now: float) -> Iterator[Violation]:
    """Yields a violation if the last upkeep (`seen_at`) is too long ago. Call this long enough
    after the faults."""
    if seen_at is None or now - seen_at > _MOST_SECONDS_OLD:
        yield Violation("no upkeep", "", f"last at {seen_at}, and now it is {now:.3f}")
