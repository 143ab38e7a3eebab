"""Random numbers as a pure function of (seed, position), with the same values on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_FIRST = np.array([0xBF58476D1CE4E5B9], dtype=np.uint64)
_SECOND = np.array([0x94D049BB133111EB], dtype=np.uint64)


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Returns a random number in [0, 1) for each pair of a seed and a position. Computes SplitMix64
    (Steele, Lea and Flood, 2014), with a separate stream for each seed."""
    mixed = _splitmix(_splitmix(seeds) + positions * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
