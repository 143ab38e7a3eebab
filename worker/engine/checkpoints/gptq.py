"""Reads weights in the format `gptq`, which GPTQModel, AutoGPTQ and other tools write.

Source: https://github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.checkpoints.unpacking import unpack, weight_of
from promptq.worker.engine.quantization.weight import QuantizedWeight

_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""For each format, the number to add to each zero point in the file."""


def _add(words: torch.Tensor, number: int, bits: int) -> torch.Tensor:
    """Returns the words with `number` added to each integer in a word. A sum may carry into the
    word's next integer, as in the tools that write these files."""
    ones = sum(1 << place for place in range(0, 32, bits))
    total = (words.long() + number * ones) & 0xFFFFFFFF
    return torch.where(total < 1 << 31, total, total - (1 << 32)).int()


class GPTQ:
    """Reads the layers of checkpoints of the method `gptq`."""

    marker = "qweight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        format = config.get("checkpoint_format", "gptq")
        self.bits: int = config.get("bits", 0)
        if format not in _FORMATS:
            raise UnsupportedModelError(
                f"gptq: its format {format!r} is not one of {', '.join(_FORMATS)}"
            )
        if self.bits not in (4, 8):
            raise UnsupportedModelError(
                f"gptq: its weights have {self.bits} bits, but only 4 or 8 are supported"
            )
        self._added_to_zeros = _FORMATS[format]

    def weight(self, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight | torch.Tensor:
        numbers = unpack(parts["qweight"].T, self.bits)
        scales = parts["scales"].T.float()
        zeros = unpack(_add(parts["qzeros"], self._added_to_zeros, self.bits), self.bits).T
        return weight_of(numbers, scales, zeros, self.bits, numbers.shape[1], parts.get("g_idx"))
