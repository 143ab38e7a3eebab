"""Products of weights and inputs in FP8, computed by torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import in_fp8
from promptq.worker.engine.device.precision import product
from promptq.worker.engine.quantization.fp8_weight import HAS_FP8, FP8Weight

_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


class FP8Product:
    """A linear layer, [T, inputs] to [T, outputs], with weights and inputs in FP8 and a scale for
    each input row. Inputs in fp32 are not rounded to FP8, and their products are slow."""

    def __init__(self, weight: FP8Weight, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._numbers, self._scales = weight.numbers.t(), weight.scales.t().contiguous()
        self._bias = bias

    @staticmethod
    def takes(weight: FP8Weight) -> bool:
        """Whether torch has FP8 products for the current device and the size of this weight."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < HAS_FP8:
            return False
        return all(size % 16 == 0 for size in weight.shape)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype == torch.float32:
            return product(
                rows,
                len(self._weight.numbers),
                self._bias,
                lambda outputs: self._weight.rows(outputs).dequantized(),
            )
        numbers, scales = rounded(rows)
        # Not every GPU can return another dtype.
        y: torch.Tensor = torch._scaled_mm(
            numbers, self._numbers, scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        y = y.to(rows.dtype)
        return y if self._bias is None else y + self._bias


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows [T, inputs] in FP8, and each row's scale, fp32 [T, 1]. In FP8, the largest
    number of a row becomes the largest FP8 number."""
    num_rows, num_inputs = rows.shape
    numbers = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(num_rows, 1, dtype=torch.float32)
    tile = triton.next_power_of_2(num_inputs)
    _round_kernel[(num_rows,)](
        rows,
        numbers,
        scales,
        NUM_INPUTS=num_inputs,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )
    return numbers, scales


@triton.jit
def _round_kernel(
    rows: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    within = column < NUM_INPUTS
    x = tl.load(rows + row * NUM_INPUTS + column, mask=within, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / _LARGEST, 2.0**-126)  # all numbers may be 0
    tl.store(numbers + row * NUM_INPUTS + column, in_fp8(x / scale), mask=within)
    tl.store(scales + row, scale)
