"""What becomes of a vector between the engine and its event."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt

from promptq.shared.protocol.request import Embed

_SHORTEST = 1e-12
"""A vector that is shorter is not made longer, as in torch's `normalize`."""


def encoded(vector: npt.NDArray[np.float32], asked: Embed) -> str:
    """Base64 of little-endian float32: the first `dimensions` numbers, at length 1 if asked for."""
    numbers = vector[: asked.dimensions].astype(np.float64)
    if asked.normalize:
        numbers /= max(float(np.linalg.norm(numbers)), _SHORTEST)
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode("ascii")
