"""Weights in FP8 with a scale for each block, as DeepSeek publishes them and transformers' `fp8`
saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class FP8:
    """Checkpoints of the method `fp8`."""

    marker = "weight_scale_inv"
    bits = 8

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block = config.get("weight_block_size")

    def weight(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In fp32. Raises KeyError for a part that is missing."""
        return scaled(parts["weight"], parts[self.marker], self._block)


def scaled(weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None) -> torch.Tensor:
    """A weight [outputs, inputs] times the scales of its blocks, of its outputs, or of all."""
    scales = scales.float()
    if block is not None and scales.dim() == 2:
        scales = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        scales = scales[: weight.shape[0], : weight.shape[1]]
    elif scales.dim() == 1:
        scales = scales.unsqueeze(1)
    return weight.float() * scales
