"""Products with weights of 8 or 4 bits.

For few rows, weights are widened in registers. For many, they are widened once, some outputs at a
time, and torch multiplies. Either way a weight is rounded to the dtype of the rows. Only where an
output has one scale and no offset, and rows are few, integers are multiplied, which are exact, and
the sum is scaled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import dot, num_processors
from promptq.worker.engine.quantization.weight import QuantizedWeight

FEW_ROWS = 256
"""Up to so many, weights are widened in registers, and again for each tile of rows."""
_OUTPUT_TILE = 128
"""A program reads the inputs of its rows again for each tile, so they are large. Its warps share
the outputs, so each widens a part of the weights."""
_ROW_TILE = 64
STEP = 64
"""Inputs of an iteration."""
_LEAST_ITERATIONS = 4
"""Of a program, so that what it adds takes longer than passing on the sum."""
_STAGES = 3
"""The numbers and inputs of two iterations are under way while a program computes one."""
PROGRAMS_PER_PROCESSOR = 3
_MAX_REGISTERS = 168
"""Of a thread, so that these programs fit on a processor beside each other."""
_WIDENED_AT_ONCE = 8 << 20
"""Numbers of a weight, of many rows. In 16 bits they stay in the card's cache until they are
multiplied."""
_WIDENED_TILE = 1024


class QuantizedProduct:
    """A linear layer: rows [T, inputs] give rows [T, outputs]. Few rows take one launch."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        outputs, inputs = weight.shape
        self._part = STEP  # inputs that share a group
        if weight.group < inputs:
            self._part = min(STEP, weight.group & -weight.group)
        tiles, device = triton.cdiv(outputs, _OUTPUT_TILE), weight.numbers.device
        at_once = PROGRAMS_PER_PROCESSOR * num_processors(device)
        most = triton.cdiv(inputs, STEP * _LEAST_ITERATIONS)
        self._splits = max(1, min(at_once // tiles, most))
        counters = tiles * triton.cdiv(FEW_ROWS, _ROW_TILE)
        self._num_finished = torch.zeros(counters, dtype=torch.int32, device=device)

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        """Whether groups have a size that is known to be fast."""
        return weight.group >= weight.inputs or weight.group % 16 == 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        output = rows.new_empty(len(rows), len(self._weight.numbers))
        if len(rows) <= FEW_ROWS:
            self._multiply(rows, output)
        else:
            self._widen_and_multiply(rows, output)
        return output

    def _multiply(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        num_rows, num_inputs = rows.shape
        num_outputs = output.shape[1]
        weight, bias = self._weight, self._bias
        is_wide = rows.element_size() > 2  # larger tiles would spill registers
        output_tile = _OUTPUT_TILE // 4 if is_wide else _OUTPUT_TILE
        row_tile = 16 if is_wide else max(16, min(_ROW_TILE, triton.next_power_of_2(num_rows)))
        tiles, row_tiles = triton.cdiv(num_outputs, output_tile), triton.cdiv(num_rows, row_tile)
        splits = 1 if is_wide else self._splits
        sums = self._num_finished
        if splits > 1:
            sums = rows.new_empty(
                splits * tiles * row_tiles * output_tile * row_tile, dtype=torch.float32
            )
        _product_kernel[(row_tiles, tiles, splits)](
            rows,
            weight.numbers,
            weight.scales,
            weight.scales if weight.offsets is None else weight.offsets,
            rows if bias is None else bias,
            output,
            sums,
            self._num_finished,
            num_rows,
            NUM_INPUTS=num_inputs,
            NUM_OUTPUTS=num_outputs,
            BITS=weight.bits,
            GROUP=weight.group,
            HAS_OFFSETS=weight.offsets is not None,
            HAS_BIAS=bias is not None,
            STEP=STEP,
            PART=self._part,
            SPLITS=splits,
            OUTPUT_TILE=output_tile,
            ROW_TILE=row_tile,
            STAGES=_STAGES,
            num_warps=4,
            maxnreg=_MAX_REGISTERS,
        )

    def _widen_and_multiply(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        num_inputs, weight, bias = rows.shape[1], self._weight, self._bias
        at_once = max(1, _WIDENED_AT_ONCE // num_inputs)
        for first in range(0, output.shape[1], at_once):
            part = output[:, first : first + at_once]
            wide = rows.new_empty(part.shape[1], num_inputs)
            of_part = weight.rows(slice(first, first + at_once))
            _widen_kernel[(len(wide), triton.cdiv(num_inputs, _WIDENED_TILE))](
                of_part.numbers,
                of_part.scales,
                of_part.scales if of_part.offsets is None else of_part.offsets,
                wide,
                NUM_INPUTS=num_inputs,
                BITS=weight.bits,
                GROUP=weight.group,
                HAS_OFFSETS=weight.offsets is not None,
                TILE=_WIDENED_TILE,
                num_warps=4,
            )
            if bias is None:
                torch.mm(rows, wide.t(), out=part)
            else:
                torch.addmm(bias[first : first + at_once], rows, wide.t(), out=part)


@triton.jit(do_not_specialize=["num_rows"])  # it differs from step to step
def _product_kernel(
    rows: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    sums: tl.tensor,
    num_finished: tl.tensor,
    num_rows: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program for each tile of rows, tile of outputs, and split of the inputs.

    Weights are the left side of products. An iteration takes STEP inputs, of which each PART
    is in one group. The program that finishes a tile last adds the sums of its splits, in their
    order.
    """
    EACH: tl.constexpr = 8 // BITS  # inputs of a byte
    ROW_BYTES: tl.constexpr = (NUM_INPUTS + EACH - 1) // EACH
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    MIDDLE: tl.constexpr = 0 if HAS_OFFSETS else 1 << (BITS - 1)
    ITERATIONS: tl.constexpr = (NUM_INPUTS + STEP - 1) // STEP
    IS_EVEN: tl.constexpr = NUM_INPUTS % STEP == 0
    IS_SCALED_LAST: tl.constexpr = NUM_GROUPS == 1 and not HAS_OFFSETS
    split = tl.program_id(2)
    place = tl.program_id(1) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    # What is beyond the end is read from the last one, and not written.
    read = tl.minimum(place, NUM_OUTPUTS - 1)
    bytes_of = numbers + read.to(tl.int64)[:, None] * ROW_BYTES
    inputs_of = rows + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * NUM_INPUTS
    none = tl.zeros((OUTPUT_TILE, ROW_TILE), tl.float32)
    total = none
    for iteration in tl.range(
        split * ITERATIONS // SPLITS, (split + 1) * ITERATIONS // SPLITS, num_stages=STAGES
    ):
        first = iteration * STEP
        byte = first // EACH + tl.arange(0, STEP // EACH)
        column = first + tl.arange(0, STEP)
        if IS_EVEN:
            packed = tl.load(bytes_of + byte[None, :])
            x = tl.load(inputs_of + column[:, None])
        else:
            packed = tl.load(bytes_of + byte[None, :], mask=(byte < ROW_BYTES)[None, :], other=0)
            is_input = (column < NUM_INPUTS)[:, None]
            x = tl.load(inputs_of + column[:, None], mask=is_input, other=0.0)
        weights = _integers(packed, BITS, MIDDLE)
        if not IS_SCALED_LAST:
            part = first + PART * tl.arange(0, STEP // PART)
            group = read[:, None] * NUM_GROUPS + tl.minimum(part // GROUP, NUM_GROUPS - 1)[None, :]
            weights = tl.reshape(weights, (OUTPUT_TILE, STEP // PART, PART))
            weights *= tl.load(scales + group).to(tl.float32)[:, :, None]
            if HAS_OFFSETS:
                weights += tl.load(offsets + group).to(tl.float32)[:, :, None]
            weights = tl.reshape(weights, (OUTPUT_TILE, STEP))
        total = dot(weights.to(x.dtype), x, total)
    if IS_SCALED_LAST:
        total *= tl.load(scales + read).to(tl.float32)[:, None]

    is_last = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        within = tl.arange(0, OUTPUT_TILE)[:, None] * ROW_TILE + tl.arange(0, ROW_TILE)[None, :]
        of_tile = sums + tile.to(tl.int64) * (SPLITS * OUTPUT_TILE * ROW_TILE) + within
        tl.store(of_tile + split * (OUTPUT_TILE * ROW_TILE), total)
        # All threads have written before one of them counts the split as finished.
        tl.debug_barrier()
        finished = 1 + tl.atomic_add(num_finished + tile, 1, sem="acq_rel", scope="gpu")
        is_last = finished == SPLITS
        if is_last:
            # Another processor may have written them, so they are read past the first cache.
            total = none
            for other in range(SPLITS):
                total += tl.load(of_tile + other * (OUTPUT_TILE * ROW_TILE), cache_modifier=".cg")
            tl.store(num_finished + tile, 0)  # for the next launch
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + read).to(tl.float32)[:, None]
        target = output + row.to(tl.int64)[None, :] * NUM_OUTPUTS + place[:, None]
        tl.store(target, total, mask=(place < NUM_OUTPUTS)[:, None] & (row < num_rows)[None, :])


@triton.jit
def _widen_kernel(
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    wide: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program for each output, and tile of its inputs: what its weights stand for."""
    EACH: tl.constexpr = 8 // BITS
    ROW_BYTES: tl.constexpr = (NUM_INPUTS + EACH - 1) // EACH
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    MIDDLE: tl.constexpr = 0 if HAS_OFFSETS else 1 << (BITS - 1)
    place = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * (TILE // EACH) + tl.arange(0, TILE // EACH)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    within = column < NUM_INPUTS
    packed = tl.load(numbers + place * ROW_BYTES + byte, mask=byte < ROW_BYTES)
    weights = tl.reshape(_integers(packed[None, :], BITS, MIDDLE), (TILE,))
    group = place * NUM_GROUPS + column // GROUP
    weights *= tl.load(scales + group, mask=within).to(tl.float32)
    if HAS_OFFSETS:
        weights += tl.load(offsets + group, mask=within).to(tl.float32)
    tl.store(wide + place * NUM_INPUTS + column, weights, mask=within)


@triton.jit
def _integers(packed: tl.tensor, BITS: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """[outputs, inputs]: the integers less MIDDLE, in fp32, of bytes [outputs, bytes].

    In fp32, 2 ** 23 has the bits 0x4B000000, and its last bits count ones. So this takes fewer
    instructions than a conversion.
    """
    if BITS == 4:
        halves = tl.join(packed & 15, packed >> 4)
        packed = tl.reshape(halves, (packed.shape[0], 2 * packed.shape[1]))
    bits = packed.to(tl.int32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)
