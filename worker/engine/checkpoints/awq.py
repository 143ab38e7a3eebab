"""Weights as AutoAWQ packs them in the version `gemm`.

Source: https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.checkpoints.packed_integers import offsets_of, unpacked
from promptq.worker.engine.quantization.weight import QuantizedWeight

_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""The places of eight successive outputs in a word."""


class AWQ:
    """Checkpoints of the method `awq`."""

    marker = "qweight"
    bits = 4

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError for a variant that is not supported."""
        version = config.get("version", config.get("format", "gemm"))
        bits = config.get("bits", config.get("w_bit"))
        if str(version).lower() != "gemm":
            raise UnsupportedModelError(f"awq: its version is {version!r}, and gemm is read")
        if bits != 4:
            raise UnsupportedModelError(f"awq: its weights have {bits} bits, and 4 are read")

    def weight(self, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Returns the weight of a linear layer. Raises KeyError for a part that is missing."""
        scales = parts["scales"].T.float()
        numbers, zeros = _outputs(parts["qweight"]), _outputs(parts["qzeros"])
        group = -(-numbers.shape[1] // scales.shape[1])
        return QuantizedWeight.of_numbers(numbers, scales, 4, group, offsets_of(zeros, scales, 4))


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [inputs, outputs / 8] to uint8 [outputs, inputs]."""
    numbers = unpacked(words, 4).view(len(words), -1, 8)
    return numbers[:, :, _PLACES].flatten(1).T
