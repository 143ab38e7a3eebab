"""Whether a row of measurements stays flat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FLAT_SHARE_PER_HOUR = 0.02
_SURE = 2.0


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through the second half of the samples, by least squares."""

    mean: float
    slope_per_hour: float
    error_per_hour: float
    """Standard error of the slope; samples count for less where neighbours resemble each other."""

    @property
    def share_per_hour(self) -> float:
        """Growth in an hour, in shares of the mean."""
        return self.slope_per_hour / self.mean if self.mean else 0.0

    @property
    def is_flat(self) -> bool:
        """It grows by less than 2 % an hour, or by no more than twice its standard error."""
        is_small = self.share_per_hour < FLAT_SHARE_PER_HOUR
        return is_small or self.slope_per_hour <= _SURE * self.error_per_hour


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend over the second half, as the first warms caches up. Needs 8 samples or more."""
    if len(values) < 8:
        raise ValueError(f"{len(values)} samples are fewer than the 8 that a trend needs")
    half = len(values) // 2
    hours = [it / 3600 for it in seconds[half:]]
    kept = list(values[half:])
    count = len(kept)
    mean_hour, mean = sum(hours) / count, sum(kept) / count
    spread = sum((hour - mean_hour) ** 2 for hour in hours)
    slope = sum((h - mean_hour) * (v - mean) for h, v in zip(hours, kept, strict=True)) / spread
    rest = [v - mean - slope * (h - mean_hour) for h, v in zip(hours, kept, strict=True)]
    square = sum(it * it for it in rest)
    alike = sum(a * b for a, b in pairwise(rest)) / square if square else 0.0
    alike = min(max(alike, 0.0), 0.95)
    independent = max(count * (1 - alike) / (1 + alike), 3.0)
    error = math.sqrt(square / count / (independent - 2) / (spread / count))
    return Trend(mean, slope, error)
