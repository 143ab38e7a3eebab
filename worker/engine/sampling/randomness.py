"""Random numbers as a pure function of (seed, position), with the same values on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_FIRST = np.array([0xBF58476D1CE4E5B9], dtype=np.uint64)
_SECOND = np.array([0x94D049BB133111EB], dtype=np.uint64)
_11, _27, _30, _31 = map(np.uint64, (11, 27, 30, 31))


def streams(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the start state of each seed's stream of random numbers. `uniforms` takes these
    states as `streams`."""
    return _splitmix(seeds)


def uniforms(
    streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Returns a random number in [0, 1) for each pair of a stream and a position. Computes
    SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = _splitmix(streams + positions * _GOLDEN)
    return (mixed >> _11).astype(np.float64) * 2.0**-53


def _splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + _GOLDEN
    state ^= state >> _30
    state *= _FIRST
    state ^= state >> _27
    state *= _SECOND
    state ^= state >> _31
    return state
