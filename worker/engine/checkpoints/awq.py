"""Reads weights that AutoAWQ packs in its version `gemm`.

Source: https://github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.checkpoints.unpacking import unpack, weight_of
from promptq.worker.engine.quantization.weight import QuantizedWeight

_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""The positions of eight successive outputs within a 32-bit word."""


class AWQ:
    """Reads the layers of checkpoints of the method `awq`."""

    marker = "qweight"
    bits = 4

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = config.get("version", config.get("format", "gemm"))
        bits = config.get("bits", config.get("w_bit"))
        if str(version).lower() != "gemm":
            raise UnsupportedModelError(
                f"awq: its version is {version!r}, but only gemm is supported"
            )
        if bits != 4:
            raise UnsupportedModelError(
                f"awq: its weights have {bits} bits, but only 4 are supported"
            )

    def weight(self, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight | torch.Tensor:
        scales = parts["scales"].T.float()
        numbers, zeros = _outputs(parts["qweight"]), _outputs(parts["qzeros"])
        return weight_of(numbers, scales, zeros, 4, numbers.shape[1])


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 words [inputs, outputs / 8] to uint8 [outputs, inputs]."""
    numbers = unpack(words, 4).view(len(words), -1, 8)
    return numbers[:, :, _PLACES].flatten(1).T
