"""The soak test distinguishes growth from noise."""

from __future__ import annotations

import random

import pytest

from tests.programs.soak.soaking import trend_of

SECONDS = [5.0 * n for n in range(720)]


def noisy(share_per_hour: float, noise: float, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [1000 * (1 + share_per_hour * s / 3600 + rng.gauss(0, noise)) for s in SECONDS]


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("share", [0.0, 0.01, -0.5])
def test_what_does_not_grow_is_flat(share: float, noise: float) -> None:
    assert trend_of(SECONDS, noisy(share, noise)).is_flat


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_what_grows_is_not(share: float, noise: float) -> None:
    trend = trend_of(SECONDS, noisy(share, noise))
    assert not trend.is_flat
    assert trend.slope_per_hour == pytest.approx(1000 * share, rel=0.2)


def test_a_rise_in_steps_is_found() -> None:
    values = [1000.0 + 20 * (n // 100) for n in range(720)]
    assert not trend_of(SECONDS, values).is_flat


def test_what_comes_before_the_second_half_counts_nothing() -> None:
    values = [1000.0 + min(n, 300) for n in range(720)]
    assert trend_of(SECONDS, values).is_flat


def test_a_single_outlier_is_no_growth() -> None:
    values = [1000.0] * 720
    values[700] = 1500.0
    assert trend_of(SECONDS, values).is_flat


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="7 samples"):
        trend_of(SECONDS[:7], [1.0] * 7)
