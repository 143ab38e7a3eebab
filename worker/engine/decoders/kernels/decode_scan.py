"""Computes a recurrence row by row."""

from __future__ import annotations

import triton
import triton.language as tl

from promptq.worker.engine.decoders.kernels.scan_tokens import inverse_lengths, key_decays, rates_of
from promptq.worker.engine.decoders.kernels.sequences import sequence_at


@triton.jit(do_not_specialize=["num_sequences"])  # it differs from step to step
def decode_scan_kernel(
    convolved: tl.tensor,
    rates: tl.tensor,
    decays: tl.tensor,
    biases: tl.tensor,
    skips: tl.tensor,
    states: tl.tensor,
    table: tl.tensor,
    output: tl.tensor,
    num_sequences: tl.tensor,
    rate_stride: tl.tensor,
    least_time: tl.tensor,
    most_time: tl.tensor,
    most_rate: tl.tensor,
    query_scale: tl.tensor,
    QUERY_FIRST: tl.constexpr,
    KEY_FIRST: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_KEY_DECAYS: tl.constexpr,
    IS_DECODE: tl.constexpr,
) -> None:
    """Each Triton program computes one sequence, for one value head and a tile of state columns.
    With IS_DECODE, the programs compute only sequences with one row."""
    NUM_TILES: tl.constexpr = (VALUE_SIZE + VALUE_TILE - 1) // VALUE_TILE
    read, written, first, count, known = sequence_at(table, tl.program_id(0), num_sequences)
    if (count != 1) if IS_DECODE else (count == 0):  # in a padded step
        return
    head, tile = tl.program_id(1) // NUM_TILES, tl.program_id(1) % NUM_TILES
    one = tl.arange(0, 1)
    key = tl.arange(0, KEY_TILE)[None, :]
    value = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)[:, None]
    # Columns are the first dimension here, because a warp sums up keys fastest.
    place = key * VALUE_SIZE + value
    is_key, is_value = key < KEY_SIZE, value < VALUE_SIZE
    mask = is_key & is_value
    before = states + (read * NUM_HEADS + head) * KEY_SIZE * VALUE_SIZE
    after = states + (written * NUM_HEADS + head) * KEY_SIZE * VALUE_SIZE
    state = tl.load(before + place, mask=mask, other=0.0)
    for index in range(1 if IS_DECODE else count):
        row = first + index
        decay, rate = rates_of(
            rates + row * rate_stride + one,
            one == 0,
            head,
            decays,
            biases,
            least_time,
            most_time,
            most_rate,
            NUM_HEADS,
            IS_DELTA,
        )
        decay = decay[:, None]
        if HAS_KEY_DECAYS:
            decay = key_decays(
                rates + row * rate_stride + one[:, None],
                biases,
                decays,
                is_key,
                head,
                tl.arange(0, KEY_TILE),
                least_time,
                most_time,
                NUM_HEADS,
                KEY_SIZE,
            )
        source = convolved + row * NUM_CHANNELS
        keys = source + (head // GROUP) * KEY_SIZE + key
        k = tl.load(keys + KEY_FIRST, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(keys + QUERY_FIRST, mask=is_key, other=0.0).to(tl.float32)
        if IS_DELTA:
            k, q = k * inverse_lengths(k)[:, None], q * inverse_lengths(q)[:, None]
        v = tl.load(source + VALUE_FIRST + head * VALUE_SIZE + value, mask=is_value, other=0.0)
        v = v.to(tl.float32)
        state *= tl.exp(decay)
        change = v
        if IS_DELTA:
            change -= tl.sum(state * k, 1, keep_dims=True)
        state += k * (rate[:, None] * change)
        result = tl.sum(state * (q * query_scale), 1, keep_dims=True)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        tl.store(output + (row * NUM_HEADS + head) * VALUE_SIZE + value, result, mask=is_value)
        tl.store(after + place, state, mask=mask & (index == known - 1))  # drafted rows follow
