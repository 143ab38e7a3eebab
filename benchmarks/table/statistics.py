"""Computes figures from the measurements of rows: percentiles of a round, medians of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from benchmarks.table.jobs import Outcome

Figures = dict[str, float]
"""By name: `tokens_per_second`, `requests_per_second`, `first_token_p50`, `first_token_p95`,
`gap_p50`, `gap_p95` (seconds between events of one request), `peak_bytes`, and the engine's
counters. Figures that a row does not report are missing."""

Measured = dict[tuple[str, str, str], Figures]
"""Medians by (model, workload, row)."""


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the value that `share` of all values do not exceed, with interpolation."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to take a percentile of")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(outcome: Outcome) -> Figures:
    """Returns the figures of one round of one workload."""
    traces = outcome.traces
    found: Figures = dict(outcome.counters)
    found["requests_per_second"] = len(traces) / outcome.seconds
    found["tokens_per_second"] = sum(trace.num_tokens for trace in traces) / outcome.seconds
    if outcome.peak_bytes:
        found["peak_bytes"] = outcome.peak_bytes
    streamed = [trace for trace in traces if trace.events]
    if streamed:
        waits = [trace.events[0] - trace.submitted for trace in streamed]
        found["first_token_p50"] = percentile(waits, 0.5)
        found["first_token_p95"] = percentile(waits, 0.95)
    if gaps := [after - before for trace in streamed for before, after in pairwise(trace.events)]:
        found["gap_p50"] = percentile(gaps, 0.5)
        found["gap_p95"] = percentile(gaps, 0.95)
    return found


def medians(rounds: Sequence[Figures]) -> Figures:
    """Returns the median of each figure, over the rounds that have it."""
    names = {name for each in rounds for name in each}
    return {
        name: statistics.median(each[name] for each in rounds if name in each) for name in names
    }


def get(measured: Measured, key: tuple[str, str, str], figure: str) -> float | None:
    return measured.get(key, {}).get(figure)
