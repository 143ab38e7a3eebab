"""Products with weights of 8 or 4 bits, which are dequantized in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import dot
from promptq.worker.engine.quantization.weight import QuantizedWeight

STEP = 64
"""The number of inputs that an iteration of `multiplied` reads."""
_STAGES = tl.constexpr(4)
"""Pipeline depth: data of three iterations are loaded while a fourth iteration computes."""


def part_of(weight: QuantizedWeight) -> int:
    """Returns the size of a part: a number of successive inputs, at most STEP, that always have the
    same group and scale."""
    is_whole = weight.group >= weight.inputs
    return STEP if is_whole else min(STEP, weight.group & -weight.group)


@triton.jit
def multiplied(
    numbers: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    read: tl.tensor,
    inputs_of: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """Returns the product [outputs, rows] in fp32, summed over iterations `start` to `end - 1`.

    `read` [outputs] has the indices of the outputs to compute, and `inputs_of` [1, rows] points to
    the rows' inputs. An iteration has STEP inputs. PART successive inputs always have the same
    group (see `part_of`).
    """
    EACH: tl.constexpr = 8 // BITS  # inputs of a byte
    ROW_BYTES: tl.constexpr = (NUM_INPUTS + EACH - 1) // EACH
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    MIDDLE: tl.constexpr = 0 if HAS_OFFSETS else 1 << (BITS - 1)
    IS_EVEN: tl.constexpr = NUM_INPUTS % STEP == 0
    IS_SCALED_LAST: tl.constexpr = NUM_GROUPS == 1 and not HAS_OFFSETS
    bytes_of = numbers + read.to(tl.int64)[:, None] * ROW_BYTES
    total = tl.zeros((read.shape[0], inputs_of.shape[1]), tl.float32)
    if not IS_SCALED_LAST:
        group = groups_of(read, start * STEP, STEP // PART, PART, GROUP, NUM_GROUPS)
        scale = tl.load(scales + group)
        offset = scale
        if HAS_OFFSETS:
            offset = tl.load(offsets + group)
    for iteration in tl.range(start, end, num_stages=_STAGES):
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
        weights = integers(packed, BITS, MIDDLE)
        if not IS_SCALED_LAST:
            weights = scaled(weights, scale, offset, HAS_OFFSETS, PART)
            # Read one iteration early, because background copies need at least 4 bytes.
            group = groups_of(read, first + STEP, STEP // PART, PART, GROUP, NUM_GROUPS)
            scale = tl.load(scales + group)
            if HAS_OFFSETS:
                offset = tl.load(offsets + group)
        total = dot(weights.to(x.dtype), x, total)
    if IS_SCALED_LAST:
        total *= tl.load(scales + read).to(tl.float32)[:, None]
    return total


@triton.jit
def groups_of(
    output: tl.tensor,
    first: tl.tensor,
    COUNT: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Returns [outputs, COUNT]: indices of the scales of COUNT parts. A part has PART inputs, and
    the first part begins at input `first`. Parts after the last input get the last group's
    index."""
    part = first + PART * tl.arange(0, COUNT)
    return output[:, None] * NUM_GROUPS + tl.minimum(part // GROUP, NUM_GROUPS - 1)[None, :]


@triton.jit
def scaled(
    numbers: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    HAS_OFFSETS: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """Returns the fp32 weights that the integers `numbers` [outputs, inputs] represent. PART
    successive inputs of an output share a scale and an offset."""
    weights = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1] // PART, PART))
    weights *= scale.to(tl.float32)[:, :, None]
    if HAS_OFFSETS:
        weights += offset.to(tl.float32)[:, :, None]
    return tl.reshape(weights, (numbers.shape[0], numbers.shape[1]))


@triton.jit
def integers(packed: tl.tensor, BITS: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """Returns the integers in `packed` [outputs, bytes], minus MIDDLE, as fp32 [outputs, inputs].

    In fp32, 2 ** 23 has the bits 0x4B000000, and 2 ** 23 + n has the integer n in its lowest bits.
    So the kernel sets these bits, and subtracts 2 ** 23. A conversion would take more instructions.
    """
    if BITS == 4:
        halves = tl.join(packed & 15, packed >> 4)
        packed = tl.reshape(halves, (packed.shape[0], 2 * packed.shape[1]))
    bits = packed.to(tl.int32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)
