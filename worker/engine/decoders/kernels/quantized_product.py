"""Products with weights of 8 or 4 bits.

For few rows, kernels dequantize weights in registers. For many rows, a kernel dequantizes some
outputs at a time, and torch multiplies. In both cases, the weights are rounded to the dtype of the
rows, with one exception. For few rows, if each output has one scale and no offset, kernels multiply
the exact integers, and scale the sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import architecture, num_processors
from promptq.worker.engine.decoders.kernels.widening import (
    STEP,
    groups_of,
    integers,
    multiplied,
    part_of,
    scaled,
)
from promptq.worker.engine.quantization.weight import QuantizedWeight

FEW_ROWS = 256
"""Up to this number of rows, kernels dequantize weights in registers."""
_OUTPUT_TILE = 128
"""Number of outputs in a tile. Tiles are large, because every tile reads all inputs again."""
_ROW_TILE = 64
_LEAST_ITERATIONS = 12
"""The fewest iterations of a program. In shorter programs, storing partial sums takes too long."""
_NUM_WARPS = 4
_WIDENED_AT_ONCE = 8 << 20
"""For many rows: the approximate number of weights that are dequantized at a time. In 16 bits, they
stay in the GPU's cache until they are multiplied."""
_WIDENED_OUTPUTS, _WIDENED_INPUTS = 16, 256
"""Number of outputs and inputs in a tile of `_widen_kernel`."""


def programs_per_processor(architecture: int) -> int:
    """Returns the number of programs that a multiprocessor runs in parallel. On GPUs with an
    architecture below 90, a third program would have too few registers."""
    return 3 if architecture >= 90 else 2


class QuantizedProduct:
    """A linear layer, [T, inputs] to [T, outputs]. One launch computes up to FEW_ROWS rows."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        outputs, inputs = weight.shape
        self._part = part_of(weight)
        tiles, device = triton.cdiv(outputs, _OUTPUT_TILE), weight.numbers.device
        at_once = programs_per_processor(architecture(device))
        # For each thread, so that these programs fit on a processor. Registers come in eights.
        self._most_registers = min(255, 65_536 // (at_once * _NUM_WARPS * 32) // 8 * 8)
        most = triton.cdiv(inputs, STEP * _LEAST_ITERATIONS)
        self._splits = max(1, min(at_once * num_processors(device) // tiles, most))
        counters = tiles * triton.cdiv(FEW_ROWS, _ROW_TILE)
        self._num_finished = torch.zeros(counters, dtype=torch.int32, device=device)

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        """Whether the kernels support the weight's group size, and are fast with this size."""
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
            num_warps=_NUM_WARPS,
            maxnreg=self._most_registers,
        )

    def _widen_and_multiply(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        (num_outputs, num_inputs), weight, bias = self._weight.shape, self._weight, self._bias
        num_parts = triton.cdiv(num_outputs * num_inputs, _WIDENED_AT_ONCE)
        # Products are slow if outputs do not begin at a multiple of 16 bytes.
        at_once = triton.cdiv(triton.cdiv(num_outputs, num_parts), _OUTPUT_TILE) * _OUTPUT_TILE
        for first in range(0, num_outputs, at_once):
            part = output[:, first : first + at_once]
            wide = rows.new_empty(part.shape[1], num_inputs)
            of_part = weight.rows(slice(first, first + at_once))
            grid = (
                triton.cdiv(len(wide), _WIDENED_OUTPUTS),
                triton.cdiv(num_inputs, _WIDENED_INPUTS),
            )
            _widen_kernel[grid](
                of_part.numbers,
                of_part.scales,
                of_part.scales if of_part.offsets is None else of_part.offsets,
                wide,
                len(wide),
                NUM_INPUTS=num_inputs,
                BITS=weight.bits,
                GROUP=weight.group,
                HAS_OFFSETS=weight.offsets is not None,
                PART=self._part,
                OUTPUTS=_WIDENED_OUTPUTS,
                STEP=_WIDENED_INPUTS,
                num_warps=_NUM_WARPS,
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
) -> None:
    """Each Triton program computes one tile of the result for one of SPLITS parts of the inputs.
    The last program to finish a tile adds the sums of all parts in order."""
    ITERATIONS: tl.constexpr = (NUM_INPUTS + STEP - 1) // STEP
    split = tl.program_id(2)
    place = tl.program_id(1) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    # Outputs and rows beyond the end read the last one, and are not written.
    read = tl.minimum(place, NUM_OUTPUTS - 1)
    inputs_of = rows + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * NUM_INPUTS
    start, end = split * ITERATIONS // SPLITS, (split + 1) * ITERATIONS // SPLITS
    total = multiplied(
        numbers,
        scales,
        offsets,
        read,
        inputs_of,
        start,
        end,
        NUM_INPUTS,
        BITS,
        GROUP,
        HAS_OFFSETS,
        STEP,
        PART,
    )

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
            # Other processors may have written the sums, so reads bypass the first-level cache.
            total = tl.zeros((OUTPUT_TILE, ROW_TILE), tl.float32)
            for other in tl.range(SPLITS, num_stages=2):  # to load ahead
                total += tl.load(of_tile + other * (OUTPUT_TILE * ROW_TILE), cache_modifier=".cg")
            tl.store(num_finished + tile, 0)  # for the next launch
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + read).to(tl.float32)[:, None]
        target = output + row.to(tl.int64)[None, :] * NUM_OUTPUTS + place[:, None]
        tl.store(target, total, mask=(place < NUM_OUTPUTS)[:, None] & (row < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_outputs"])  # parts of a weight differ
def _widen_kernel(
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    wide: tl.tensor,
    num_outputs: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PART: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    EACH: tl.constexpr = 8 // BITS
    ROW_BYTES: tl.constexpr = (NUM_INPUTS + EACH - 1) // EACH
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    MIDDLE: tl.constexpr = 0 if HAS_OFFSETS else 1 << (BITS - 1)
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * STEP
    byte = first // EACH + tl.arange(0, STEP // EACH)
    column = first + tl.arange(0, STEP)
    is_output = (place < num_outputs)[:, None]
    read = tl.minimum(place, num_outputs - 1)
    bytes_of = numbers + read.to(tl.int64)[:, None] * ROW_BYTES
    packed = tl.load(bytes_of + byte[None, :], mask=(byte < ROW_BYTES)[None, :], other=0)
    group = groups_of(read, first, STEP // PART, PART, GROUP, NUM_GROUPS)
    scale = tl.load(scales + group)
    offset = scale
    if HAS_OFFSETS:
        offset = tl.load(offsets + group)
    weights = scaled(integers(packed, BITS, MIDDLE), scale, offset, HAS_OFFSETS, PART)
    target = wide + place.to(tl.int64)[:, None] * NUM_INPUTS + column[None, :]
    tl.store(target, weights, mask=is_output & (column < NUM_INPUTS)[None, :])
