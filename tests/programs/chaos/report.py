"""Shows what a run was and what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tests.programs.chaos.audit.outcome import Outcome

_MOST_SHOWN = 100


def report(outcome: Outcome) -> str:
    """A table of the faults injected and the violations found."""
    return "\n".join(_lines(outcome))


def mutant_table(outcomes: Mapping[str, Outcome]) -> str:
    """When each mutant was caught, by which rules."""
    rows = ["| mutant | caught after | violations |", "|---|---|---|"]
    for name, outcome in outcomes.items():
        rules = Counter(violation.rule for violation in outcome.violations)
        found = ", ".join(f"{rule} ({count})" for rule, count in rules.most_common())
        when = f"{outcome.caught_after:.0f} s" if outcome.caught_after is not None else "the end"
        rows.append(f"| `{name}` | {when if found else 'not'} | {found} |")
    return "\n".join(rows)


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"chaos: seed {outcome.seed}, {outcome.seconds:g} s of faults"
    yield ""
    yield "faults injected"
    for fault, count in sorted(outcome.faults.items(), key=lambda it: -it[1]):
        yield f"  {count:7,}  {fault}"
    yield f"  {outcome.num_swallowed:7,}  replies swallowed by these in all"
    yield "workers that ended"
    for queue, ends in outcome.ends.items():
        for reason, count in sorted(ends.items(), key=lambda it: -it[1]):
            yield f"  {count:7,}  {queue}: {reason}"
    yield "requests accepted"
    for (queue, told), count in sorted(outcome.requests.items()):
        yield f"  {count:7,}  {queue}: {told}"
    yield ""
    yield (
        f"{outcome.num_requests:,} requests, {outcome.num_deaths:,} worker deaths,"
        f" {outcome.num_streams:,} streams with {outcome.num_events:,} events,"
        f" {outcome.num_carried_on:,} of them carried on by another worker"
    )
    for way, count in sorted(outcome.passed_on.items()):
        yield f"{count:,} streams passed {way}"
    yield f"{len(outcome.violations):,} violations"
    for violation in outcome.violations[:_MOST_SHOWN]:
        yield f"  {violation}"
    if len(outcome.violations) > _MOST_SHOWN:
        yield f"  ... and {len(outcome.violations) - _MOST_SHOWN:,} more"
