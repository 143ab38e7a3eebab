"""Weights of 8 or 4 bits, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from promptq.worker.engine.native.library import load_native


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs] on a CPU. A number is `scale * (n - 2 ** (bits - 1))`, and `group`
    inputs of an output share a scale."""

    numbers: torch.Tensor
    """uint8 [outputs, inputs]; of 4 bits, two of a row share a byte, the lower half first."""
    scales: torch.Tensor
    """fp32 [outputs, ceil(inputs / group)]."""
    bits: int
    group: int
    inputs: int

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int, group: int | None = None) -> QuantizedWeight:
        """Round a weight [outputs, inputs] in fp32 or bf16. Without a group, an output has one
        scale.

        Raises NativeError if a number is not finite.
        """
        outputs, inputs = weight.shape
        group = group or inputs
        numbers = torch.empty(outputs, -(-inputs * bits // 8), dtype=torch.uint8)
        scales = torch.empty(outputs, -(-inputs // group))
        weight = weight.contiguous()
        load_native().quantize(
            *(weight.dtype == torch.bfloat16, weight.data_ptr(), outputs, inputs, bits, group),
            *(torch.get_num_threads(), numbers.data_ptr(), scales.data_ptr()),
        )
        return cls(numbers, scales, bits, group, inputs)

    @classmethod
    def stacked(cls, weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Their outputs, one after the other. All have the same bits, groups and inputs."""
        (kind,) = {(each.bits, each.group, each.inputs) for each in weights}
        numbers = torch.cat([each.numbers for each in weights])
        return cls(numbers, torch.cat([each.scales for each in weights]), *kind)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return len(self.numbers), self.inputs

    def dequantized(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [outputs, inputs], or some of its rows."""
        numbers, scales = self.numbers, self.scales
        if rows is not None:
            numbers, scales = numbers[rows], scales[rows]
        if self.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
            numbers = numbers[..., : self.inputs]
        padded = nn.functional.pad(numbers, (0, -self.inputs % self.group))
        groups = padded.float().view(*padded.shape[:-1], -1, self.group)
        scales = scales.unsqueeze(-1)
        zero = -(2 ** (self.bits - 1)) * scales
        return torch.addcmul(zero, groups, scales).flatten(-2)[..., : self.inputs]

    def released(self) -> QuantizedWeight:
        """What is left of it when its numbers are not needed any more."""
        nothing = (self.numbers.new_empty(0), self.scales.new_empty(0))
        return QuantizedWeight(*nothing, self.bits, self.group, self.inputs)
