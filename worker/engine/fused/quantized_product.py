"""Products with weights of 8 or 4 bits, which are widened in registers.

An integer of 8 bits is exact in bf16 and fp16, so the products of a group are those of the
integers. They are scaled and added in fp32, group by group. So a row has the same bits beside any
other rows, as far as the device's products of tiles have that property.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import dot
from promptq.worker.engine.quantization.weight import QuantizedWeight

_OUTPUT_TILE = 32
_FEW_ROWS, _MANY_ROWS = 16, 64
_MOST_INPUTS = 128


class QuantizedProduct:
    """A linear layer: rows [T, inputs] give rows [T, outputs], in one launch."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._numbers, self._scales, self._offsets = weight.numbers, weight.scales, weight.offsets
        self._bias, self._bits, self._group = bias, weight.bits, weight.group
        # A step through the inputs stays within a group.
        self._step = min(_MOST_INPUTS, triton.next_power_of_2(weight.inputs))
        if weight.group < weight.inputs:
            self._step = min(self._step, weight.group & -weight.group)
        self._step = max(self._step, 16 * 8 // weight.bits)  # which a product of tiles takes

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        """Whether groups are large enough for products of tiles."""
        return weight.group >= weight.inputs or weight.group % (16 * 8 // weight.bits) == 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows, num_inputs = rows.shape
        num_outputs = len(self._numbers)
        output = rows.new_empty(num_rows, num_outputs)
        row_tile = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
        grid = (triton.cdiv(num_outputs, _OUTPUT_TILE), triton.cdiv(num_rows, row_tile))
        _product_kernel[grid](
            rows,
            self._numbers,
            self._scales,
            self._scales if self._offsets is None else self._offsets,
            rows if self._bias is None else self._bias,
            output,
            num_rows,
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=num_outputs,
            BITS=self._bits,
            GROUP=self._group,
            HAS_OFFSETS=self._offsets is not None,
            HAS_BIAS=self._bias is not None,
            STEP=self._step,
            OUTPUT_TILE=_OUTPUT_TILE,
            ROW_TILE=row_tile,
            num_warps=4,
        )
        return output


@triton.jit
def _product_kernel(
    rows: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEP: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    """One program for each tile of outputs and of rows. Weights are the left side of products."""
    EACH: tl.constexpr = 8 // BITS  # inputs of a byte
    ROW_BYTES: tl.constexpr = (NUM_INPUTS + EACH - 1) // EACH
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    MIDDLE: tl.constexpr = 0 if HAS_OFFSETS else 1 << (BITS - 1)
    place = tl.program_id(0) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    row = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_output, is_row = place < NUM_OUTPUTS, row < num_rows
    bytes_of = numbers + place.to(tl.int64)[:, None] * ROW_BYTES
    inputs_of = rows + row.to(tl.int64)[None, :] * NUM_INPUTS
    none = tl.zeros((OUTPUT_TILE, ROW_TILE), tl.float32)
    total = none
    for first in range(0, NUM_INPUTS, STEP):
        index = tl.arange(0, STEP // EACH)
        byte = first // EACH + index
        packed = tl.load(
            bytes_of + byte[None, :], mask=is_output[:, None] & (byte < ROW_BYTES)[None, :], other=0
        )
        column = first + EACH * index
        x = _inputs(inputs_of, column, is_row, NUM_INPUTS)
        if BITS == 8:
            sums = _add_dot(none, packed.to(tl.int32) - MIDDLE, x)
            sum_of_inputs = tl.sum(x.to(tl.float32), 0)
        else:
            other = _inputs(inputs_of, column + 1, is_row, NUM_INPUTS)
            sums = _add_dot(none, (packed & 15).to(tl.int32) - MIDDLE, x)
            sums = _add_dot(sums, (packed >> 4).to(tl.int32) - MIDDLE, other)
            sum_of_inputs = tl.sum(x.to(tl.float32), 0) + tl.sum(other.to(tl.float32), 0)
        group = place * NUM_GROUPS + first // GROUP
        scale = tl.load(scales + group, mask=is_output, other=0.0).to(tl.float32)
        total += scale[:, None] * sums
        if HAS_OFFSETS:
            offset = tl.load(offsets + group, mask=is_output, other=0.0).to(tl.float32)
            total += offset[:, None] * sum_of_inputs[None, :]
    if HAS_BIAS:
        total += tl.load(bias + place, mask=is_output, other=0.0).to(tl.float32)[:, None]
    target = output + row.to(tl.int64)[None, :] * NUM_OUTPUTS + place[:, None]
    tl.store(target, total, mask=is_output[:, None] & is_row[None, :])


@triton.jit
def _inputs(
    inputs_of: tl.tensor, column: tl.tensor, is_row: tl.tensor, NUM_INPUTS: tl.constexpr
) -> tl.tensor:
    """Some inputs [inputs, rows] of each row."""
    is_input = column < NUM_INPUTS
    return tl.load(inputs_of + column[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)


@triton.jit
def _add_dot(total: tl.tensor, integers: tl.tensor, x: tl.tensor) -> tl.tensor:
    return dot(integers.to(tl.float32).to(x.dtype), x, total)
