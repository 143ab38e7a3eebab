"""Causal convolution of each channel over the last positions of a sequence."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from promptq.worker.engine.decoders.kernels.sequences import StepSequences, sequence_at

_ROW_TILE = 4
_CHANNEL_TILE = 256


def convolve(
    inputs: torch.Tensor,
    convolution: Any,
    sequences: StepSequences,
    windows: torch.Tensor,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Returns the convolution [T, channels] of a step's rows. Writes the windows for the next step.

    `inputs` [T, channels] may be some columns of a larger tensor. SiLU follows the convolution. If
    `is_gated`, the inputs are b, c and x [T, 3 * channels] of a short convolution. Then the result
    is `c * convolution(b * x)`, without SiLU. `windows` [entries, size - 1, channels] are the last
    inputs before the step. The kernel rounds after each operation, like transformers' modules.
    """
    num_channels, _, size = convolution.weight.shape
    num_rows = len(inputs)
    output = inputs.new_empty(num_rows, num_channels)
    tiles = triton.cdiv(num_rows, _ROW_TILE), triton.cdiv(num_channels, _CHANNEL_TILE)
    _convolution_kernel[(tiles[0] + len(sequences), tiles[1])](
        inputs,
        convolution.weight,
        convolution.weight if convolution.bias is None else convolution.bias,
        windows,
        sequences.table,
        sequences.owner,
        output,
        num_rows,
        len(sequences),
        inputs.stride(0),
        IS_GATED=is_gated,
        HAS_BIAS=convolution.bias is not None,
        NUM_CHANNELS=num_channels,
        SIZE=size,
        WINDOW_TILE=triton.next_power_of_2(size - 1),
        ROW_TILE=_ROW_TILE,
        CHANNEL_TILE=min(_CHANNEL_TILE, triton.next_power_of_2(num_channels)),
        num_warps=4,
    )
    return output


@triton.jit
def _inputs_at(
    inputs: tl.tensor,
    windows: tl.tensor,
    entry: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    is_read: tl.tensor,
    channel: tl.tensor,
    stride: tl.tensor,
    IS_GATED: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns the inputs [positions, channels] at each `position`, counted from the first row of a
    sequence in the step. Negative positions are before the step, and are read from the window.

    `entry` and `first` [positions] are the entry of the sequence's window and its first row.
    """
    is_new = (position >= 0)[:, None]
    mask = is_read[:, None] & (channel < NUM_CHANNELS)[None, :]
    new = inputs + ((first + position) * stride)[:, None] + channel[None, :]
    x = tl.load(new, mask=mask & is_new, other=0.0)
    if IS_GATED:
        factor = tl.load(new + 2 * NUM_CHANNELS, mask=mask & is_new, other=0.0)
        x = (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
    line = entry * (SIZE - 1) + position + SIZE - 1
    old = windows + (line * NUM_CHANNELS)[:, None] + channel[None, :]
    return tl.where(is_new, x, tl.load(old, mask=mask & ~is_new, other=0.0).to(x.dtype))


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])  # they differ from step to step
def _convolution_kernel(
    inputs: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    windows: tl.tensor,
    table: tl.tensor,
    owner: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    stride: tl.tensor,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
) -> None:
    """Each of the first programs computes a tile of rows and channels. Each further program writes
    a sequence's window for a tile of channels. No entry of `windows` is both read and written."""
    num_tiles = (num_rows + ROW_TILE - 1) // ROW_TILE
    program = tl.program_id(0)
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)
    within = channel < NUM_CHANNELS
    if program >= num_tiles:
        read, written, first, _, known = sequence_at(table, program - num_tiles, num_sequences)
        place = tl.arange(0, WINDOW_TILE)
        x = _inputs_at(
            inputs,
            windows,
            read + 0 * place,
            first + 0 * place,
            known - (SIZE - 1) + place,
            place < SIZE - 1,
            channel,
            stride,
            IS_GATED,
            NUM_CHANNELS,
            SIZE,
        )
        target = windows + ((written * (SIZE - 1) + place) * NUM_CHANNELS)[:, None]
        tl.store(target + channel[None, :], x, mask=(place < SIZE - 1)[:, None] & within[None, :])
        return
    dtype = inputs.dtype.element_ty
    row = program * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    sequence = tl.load(owner + row, mask=is_row, other=0)
    entry, first = tl.load(table + sequence), tl.load(table + 2 * num_sequences + sequence)
    total = tl.zeros((ROW_TILE, CHANNEL_TILE), tl.float32)
    for tap in tl.static_range(SIZE):
        x = _inputs_at(
            inputs,
            windows,
            entry,
            first,
            row - first + (tap - (SIZE - 1)),
            is_row,
            channel,
            stride,
            IS_GATED,
            NUM_CHANNELS,
            SIZE,
        )
        factor = tl.load(weight + channel * SIZE + tap, mask=within, other=0.0).to(tl.float32)
        total += x.to(tl.float32) * factor[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)[None, :]
    total = total.to(dtype).to(tl.float32)
    mask = is_row[:, None] & within[None, :]
    row = row.to(tl.int64)[:, None]
    if IS_GATED:
        gate = inputs + row * stride + NUM_CHANNELS + channel[None, :]
        total *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    else:
        total /= 1.0 + tl.exp(-total)
    tl.store(output + row * NUM_CHANNELS + channel[None, :], total, mask=mask)
