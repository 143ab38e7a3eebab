"""Reads FP8 weights with a scale for each block: the format of DeepSeek and transformers' `fp8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from promptq.worker.engine.quantization.fp8_weight import FP8Weight


class FP8:
    """Reads the layers of checkpoints of the method `fp8`."""

    marker = "weight_scale_inv"
    bits = 8

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block = config.get("weight_block_size")

    def weight(self, parts: Mapping[str, torch.Tensor]) -> FP8Weight | torch.Tensor:
        return scaled(parts["weight"], parts[self.marker], self._block)


def scaled(
    weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None
) -> FP8Weight | torch.Tensor:
    """Returns an FP8 weight with a scale for each output, or the weight in fp32 if an FP8Weight
    cannot represent the scales. Both are [outputs, inputs].

    `scales` has one scale for the weight, for each output, or for each block of the size `block`.
    """
    scales, (outputs, inputs) = scales.float(), weight.shape
    if block is not None and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        scales = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return weight.float() * scales[:outputs, :inputs]
    if weight.dtype != torch.float8_e4m3fn:
        return weight.float() * scales.reshape(-1, 1)
    return FP8Weight(weight, scales.reshape(-1, 1).expand(outputs, 1).contiguous())
