"""Figures of rounds, and medians of figures."""

import pytest

from benchmarks.table.jobs import Outcome, Trace
from benchmarks.table.statistics import figures, medians, percentile


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([4.0], 0.99) == 4.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_figures_of_a_round() -> None:
    outcome = Outcome(
        2.0,
        [Trace(1.0, [1.5, 1.6, 1.9], 3), Trace(1.0, [2.5, 2.7], 2)],
        peak_bytes=7,
        counters={"prompt_tokens": 9.0},
    )
    found = figures(outcome)
    assert found["tokens_per_second"] == 2.5
    assert found["requests_per_second"] == 1.0
    assert found["first_token_p50"] == pytest.approx(1.0)
    assert found["gap_p50"] == pytest.approx(0.2)
    assert found["peak_bytes"] == 7
    assert found["prompt_tokens"] == 9.0


def test_a_row_with_only_the_end_has_no_latencies() -> None:
    found = figures(Outcome(1.0, [Trace(0.0, num_tokens=5)]))
    assert found["tokens_per_second"] == 5.0
    assert not {"first_token_p50", "gap_p50", "peak_bytes"} & found.keys()


def test_medians_are_over_the_rounds_that_have_the_figure() -> None:
    rounds = [{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]
    assert medians(rounds) == {"a": 3.0, "b": 2.0}
