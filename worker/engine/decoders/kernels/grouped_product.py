"""Products of rows with the weights of their experts (mixture of experts).

Rows are sorted by expert, and a Triton program multiplies a tile of one expert's rows. An expert
without rows costs nothing, and no expert is padded to the size of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import dot
from promptq.worker.engine.decoders.kernels.widening import STEP, multiplied, part_of
from promptq.worker.engine.quantization.weight import QuantizedWeight

_SORTED_AT_ONCE = 2048
_ROW_TILES = (16, 64, 128)
_OUTPUT_TILE = 128
_STAGES = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class Groups:
    """All pairs of a row and one of its `top_k` experts, sorted by expert. Pair number `row * top_k
    + slot` consists of this row and the row's expert number `slot`."""

    order: torch.Tensor
    """int32 [pairs]: the pairs' indices, sorted by expert."""
    starts: torch.Tensor
    """int32 [experts + 1]: the index in `order` of each expert's first pair, then the end."""

    @classmethod
    def of(cls, experts: torch.Tensor, num_experts: int) -> Groups:
        """Sorts all (row, expert) pairs by their expert. Pairs of the same expert stay in the order
        of rows. `experts` [T, top_k], int32, has the experts of each row."""
        num_pairs = experts.numel()
        order = torch.empty_like(experts).flatten()
        starts = experts.new_empty(num_experts + 1)
        _sort_kernel[(num_experts,)](
            experts, order, starts, num_pairs, TILE=_SORTED_AT_ONCE, num_warps=8
        )
        return cls(order, starts)


class GroupedProduct:
    """A linear layer that has separate weights for each expert."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        num_experts: int,
        bias: torch.Tensor | None = None,
    ) -> None:
        """`weight` is [experts, outputs, inputs] with any strides, or a quantized weight [experts *
        outputs, inputs]. `bias` is [experts, outputs]."""
        self._bias, self._num_experts = bias, num_experts
        self._outputs, self._inputs = weight.shape[-2:]
        self._strides: tuple[int, ...] = (0, 0, 0)
        self._format = 0, 1, STEP, False
        if isinstance(weight, QuantizedWeight):
            self._outputs //= num_experts
            self._numbers, self._scales = weight.numbers, weight.scales
            self._offsets = weight.scales if weight.offsets is None else weight.offsets
            self._format = weight.bits, weight.group, part_of(weight), weight.offsets is not None
        else:
            self._numbers = self._scales = self._offsets = weight
            self._strides = weight.stride()

    def __call__(self, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Returns [pairs, outputs]. `rows` are [T, inputs], or [pairs, inputs]: one per pair."""
        num_pairs = len(groups.order)
        output = rows.new_empty(num_pairs, self._outputs)
        mean = num_pairs // self._num_experts
        row_tile = next((tile for tile in _ROW_TILES if tile >= mean), _ROW_TILES[-1])
        output_tile = _OUTPUT_TILE
        if rows.element_size() > 2:  # larger tiles would spill registers
            row_tile, output_tile = 16, _OUTPUT_TILE // 4
        # Each expert with rows may have one tile that is not full.
        tiles = num_pairs // row_tile + min(self._num_experts, num_pairs)
        bits, group, part, has_offsets = self._format
        _grouped_kernel[(tiles, triton.cdiv(self._outputs, output_tile))](
            rows,
            self._numbers,
            self._scales,
            self._offsets,
            rows if self._bias is None else self._bias,
            groups.order,
            groups.starts,
            output,
            *self._strides,
            SLOTS=num_pairs // len(rows),
            HAS_BIAS=self._bias is not None,
            NUM_EXPERTS=self._num_experts,
            EXPERT_TILE=triton.next_power_of_2(self._num_experts),
            NUM_INPUTS=self._inputs,
            NUM_OUTPUTS=self._outputs,
            BITS=bits,
            GROUP=group,
            PART=part,
            HAS_OFFSETS=has_offsets,
            STEP=STEP,
            OUTPUT_TILE=output_tile,
            ROW_TILE=row_tile,
            num_warps=8 if row_tile > 64 else 4,
        )
        return output


@triton.jit(do_not_specialize=["num_pairs"])  # it differs from step to step
def _sort_kernel(
    experts: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    mine = tl.program_id(0)
    pair = tl.arange(0, TILE)
    earlier = tl.zeros((TILE,), tl.int32)
    for first in range(0, num_pairs, TILE):
        expert = tl.load(experts + first + pair, mask=first + pair < num_pairs, other=mine)
        earlier += (expert < mine).to(tl.int32)
    place = tl.sum(earlier, 0)
    tl.store(starts + mine, place)
    for first in range(0, num_pairs, TILE):
        expert = tl.load(experts + first + pair, mask=first + pair < num_pairs, other=-1)
        is_mine = (expert == mine).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_mine, 0) - 1, first + pair, mask=is_mine > 0)
        place += tl.sum(is_mine, 0)
    tl.store(starts + mine + 1, place)  # as the next expert does


@triton.jit
def _grouped_kernel(
    rows: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    output: tl.tensor,
    expert_stride: tl.tensor,
    output_stride: tl.tensor,
    input_stride: tl.tensor,
    SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
) -> None:
    """Each Triton program computes a tile of rows and outputs of one expert. A row has SLOTS pairs.
    BITS is 0 if weights are not quantized."""
    ITERATIONS: tl.constexpr = (NUM_INPUTS + STEP - 1) // STEP
    IS_EVEN: tl.constexpr = NUM_INPUTS % STEP == 0
    index = tl.arange(0, EXPERT_TILE)
    is_expert = index < NUM_EXPERTS
    first_pair = tl.load(starts + index, mask=is_expert, other=0)
    num_pairs = tl.load(starts + index + 1, mask=is_expert, other=0) - first_pair
    num_tiles = (num_pairs + ROW_TILE - 1) // ROW_TILE
    ends = tl.cumsum(num_tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert >= NUM_EXPERTS:
        return
    tile -= tl.sum(tl.where(index == expert, ends - num_tiles, 0), 0)
    place = tl.load(starts + expert) + tile * ROW_TILE + tl.arange(0, ROW_TILE)
    is_pair = place < tl.load(starts + expert + 1)
    # Places beyond the end read pair 0, and are not written.
    pair = tl.load(order + place, mask=is_pair, other=0)
    inputs_of = rows + (pair // SLOTS).to(tl.int64)[None, :] * NUM_INPUTS
    own = tl.program_id(1) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    read = tl.minimum(own, NUM_OUTPUTS - 1).to(tl.int64)
    among_all = expert.to(tl.int64) * NUM_OUTPUTS + read
    if BITS > 0:
        total = multiplied(
            numbers,
            scales,
            offsets,
            among_all,
            inputs_of,
            0,
            ITERATIONS,
            NUM_INPUTS,
            BITS,
            GROUP,
            HAS_OFFSETS,
            STEP,
            PART,
        )
    else:
        weights_of = numbers + expert.to(tl.int64) * expert_stride + read[:, None] * output_stride
        total = tl.zeros((OUTPUT_TILE, ROW_TILE), tl.float32)
        for iteration in tl.range(0, ITERATIONS, num_stages=_STAGES):
            column = iteration * STEP + tl.arange(0, STEP)
            inputs = inputs_of + column[:, None]
            weights = weights_of + column[None, :] * input_stride
            if IS_EVEN:
                x, weight = tl.load(inputs), tl.load(weights)
            else:
                is_input = column < NUM_INPUTS
                x = tl.load(inputs, mask=is_input[:, None], other=0.0)
                weight = tl.load(weights, mask=is_input[None, :], other=0.0)
            total = dot(weight, x, total)
    if HAS_BIAS:
        total += tl.load(bias + among_all).to(tl.float32)[:, None]
    target = output + pair.to(tl.int64)[None, :] * NUM_OUTPUTS + own[:, None]
    tl.store(target, total, mask=(own < NUM_OUTPUTS)[:, None] & is_pair[None, :])
