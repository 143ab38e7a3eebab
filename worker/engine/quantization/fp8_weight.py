"""Weights in FP8."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

HAS_FP8 = (8, 9)
"""The lowest compute capability of GPUs that support FP8."""


@dataclass(frozen=True, slots=True)
class FP8Weight:
    """A weight [outputs, inputs] in FP8: `scale * number`, with one scale for each output."""

    numbers: torch.Tensor
    """float8_e4m3fn [outputs, inputs]."""
    scales: torch.Tensor
    """fp32 [outputs, 1]."""

    kind: ClassVar[str] = "fp8"
    """A key for joining weights: weights with equal keys can be joined."""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        outputs, inputs = self.numbers.shape
        return outputs, inputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.numbers, self.scales]

    def to(self, device: torch.device) -> FP8Weight:
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device))

    def rows(self, rows: torch.Tensor | slice) -> FP8Weight:
        """Returns the weight with only these outputs, in this order."""
        return FP8Weight(self.numbers[rows], self.scales[rows])

    def dequantized(self) -> torch.Tensor:
        """Returns the weight in fp32."""
        return self.numbers.float() * self.scales
