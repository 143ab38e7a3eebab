"""Products of weights and inputs in FP8, by torch."""

from __future__ import annotations

import torch

from promptq.worker.engine.quantization.fp8_weight import FP8Weight

HAS_FP8 = (8, 9)
"""The compute capability from which a card has FP8."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class FP8Product:
    """A linear layer: rows [T, inputs] give rows [T, outputs]. Each row is rounded to FP8 with a
    scale of its own."""

    def __init__(self, weight: FP8Weight, bias: torch.Tensor | None = None) -> None:
        self._numbers, self._scales = weight.numbers.t(), weight.scales.t().contiguous()
        self._bias = bias

    @staticmethod
    def takes(weight: FP8Weight) -> bool:
        """Whether the current device multiplies FP8, and weights of this size."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < HAS_FP8:
            return False
        return all(size % 16 == 0 for size in weight.shape)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        most = rows.abs().amax(1, keepdim=True).float()
        scales = (most / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        numbers = (rows / scales).to(torch.float8_e4m3fn)
        # Not every card gives another dtype.
        product: torch.Tensor = torch._scaled_mm(
            numbers, self._numbers, scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        product = product.to(rows.dtype)
        return product if self._bias is None else product + self._bias
