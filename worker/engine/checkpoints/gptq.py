"""Weights as GPTQModel, AutoGPTQ and others pack them in the format `gptq`.

Source: https://github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.checkpoints.packed_integers import (
    are_in_order,
    offsets_of,
    scattered,
    unpacked,
)
from promptq.worker.engine.quantization.weight import QuantizedWeight

_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Formats, and the number to add to each zero in the file."""


def _added(words: torch.Tensor, number: int, bits: int) -> torch.Tensor:
    """Adds a number to all that share a word. The tools do so with whole words, and carry."""
    ones = sum(1 << place for place in range(0, 32, bits))
    total = (words.long() + number * ones) & 0xFFFFFFFF
    return torch.where(total < 1 << 31, total, total - (1 << 32)).int()


class GPTQ:
    """Checkpoints of the method `gptq`."""

    marker = "qweight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError for a variant that is not supported."""
        format = config.get("checkpoint_format", "gptq")
        self.bits: int = config.get("bits", 0)
        if format not in _FORMATS:
            raise UnsupportedModelError(
                f"gptq: its format {format!r} is none of {', '.join(_FORMATS)}"
            )
        if self.bits not in (4, 8):
            raise UnsupportedModelError(
                f"gptq: its weights have {self.bits} bits, and 4 or 8 are read"
            )
        self._added = _FORMATS[format]

    def weight(self, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight | torch.Tensor:
        """Returns the weight of a linear layer. Raises KeyError for a part that is missing."""
        numbers = unpacked(parts["qweight"].T, self.bits)
        scales = parts["scales"].T.float()
        zeros = unpacked(_added(parts["qzeros"], self._added, self.bits), self.bits).T
        offsets = offsets_of(zeros, scales, self.bits)
        group = -(-numbers.shape[1] // scales.shape[1])
        groups = parts.get("g_idx")
        if groups is not None and not are_in_order(groups, group):
            return scattered(numbers, scales, offsets, groups, self.bits)
        return QuantizedWeight.of_numbers(numbers, scales, self.bits, group, offsets)
