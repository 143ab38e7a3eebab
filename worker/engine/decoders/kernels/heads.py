"""Prepares heads for attention in one kernel: norms, rotation, and writing K and V.

The kernel rounds where transformers' modules round: after each operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import as_kept
from promptq.worker.engine.decoders.kernels.norm import code_of, moments, normed
from promptq.worker.engine.decoders.norm_parts import Norm
from promptq.worker.engine.decoders.rotation_parts import RotationTables

if TYPE_CHECKING:
    from promptq.worker.engine.attention.types import LayerCache, StepLayout


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and of keys. Both have the same formula and epsilon."""

    weights: torch.Tensor  # [2, head size]
    biases: torch.Tensor | None
    epsilon: float
    code: int
    follow_rotation: bool

    @classmethod
    def of(cls, query: Norm, key: Norm, *, follow_rotation: bool) -> HeadNorms:
        weights = torch.stack([query.weight, key.weight])
        biases = None
        if query.bias is not None and key.bias is not None:
            biases = torch.stack([query.bias, key.bias])
        return cls(weights, biases, query.epsilon, code_of(query), follow_rotation)


def place_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    tables: RotationTables | None,
    norms: HeadNorms | None,
    cache: LayerCache,
    layout: StepLayout,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Returns the queries [T, num_heads, head size], and writes K and V to the cache.

    `qkv` [T, (num_heads + 2 * num_kv_heads) * head size] is the output of the projections. If
    `is_gated`, each query head is followed by its gate. `positions` are [T]. `tables`, in the
    model's dtype, rotate the first numbers of heads. Rows with block -1 (padding) are not written.
    """
    num_rows = len(qkv)
    _, num_kv_heads, block_size, size = cache.key.shape
    num_heads = (qkv.shape[1] // size - 2 * num_kv_heads) // (2 if is_gated else 1)
    group = num_heads // num_kv_heads
    head_tile, tile = triton.next_power_of_2(group + 2), triton.next_power_of_2(size)
    query = qkv.new_empty(num_rows, num_heads, size)
    _place_heads_kernel[(num_rows, num_kv_heads)](
        qkv,
        positions,
        qkv if tables is None else tables.cosine,
        qkv if tables is None else tables.sine,
        qkv if norms is None else norms.weights,
        qkv if norms is None or norms.biases is None else norms.biases,
        0.0 if norms is None else norms.epsilon,
        query,
        cache.key,
        cache.value,
        layout.write_blocks,
        layout.write_offsets,
        BEFORE=0 if norms is None or norms.follow_rotation else norms.code,
        AFTER=0 if norms is None or not norms.follow_rotation else norms.code,
        PAIRS=0 if tables is None else tables.cosine.shape[1],
        IS_INTERLEAVED=tables is not None and tables.is_interleaved,
        IS_GATED=is_gated,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        SIZE=size,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        TILE=tile,
        num_warps=min(16, max(1, head_tile * tile // 256)),
    )
    return query


@triton.jit
def partner_of(column: tl.tensor, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr) -> tl.tuple:
    """Returns three values for a rotated column: whether the column is first in its pair, the
    pair's index, and the pair's other column."""
    if IS_INTERLEAVED:
        is_first, pair = column % 2 == 0, column // 2
        partner = tl.where(is_first, column + 1, column - 1)
    else:
        is_first = column < PAIRS
        partner = tl.where(is_first, column + PAIRS, column - PAIRS)
        pair = tl.minimum(column, partner)
    return is_first, pair, partner


@triton.jit
def turned(
    own: tl.tensor,
    other: tl.tensor,
    is_first: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    turns: tl.tensor,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Returns the columns `own`, rotated where `turns` is true. The results are rounded to DTYPE,
    and returned in fp32. `other` has the partner of each column. `is_first` is true for the first
    column of a pair. `cosines` and `sines` are pointers."""
    cosine = tl.load(cosines, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines, mask=turns, other=0.0).to(tl.float32)
    straight = (own * cosine).to(DTYPE).to(tl.float32)
    across = (tl.where(is_first, -other, other) * sine).to(DTYPE).to(tl.float32)
    return (straight + across).to(DTYPE).to(tl.float32)


@triton.jit
def _place_heads_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    weights: tl.tensor,
    biases: tl.tensor,
    epsilon: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    write_blocks: tl.tensor,
    write_offsets: tl.tensor,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    dtype = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    in_group = tl.arange(0, HEAD_TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    is_query, is_key, is_value = in_group < GROUP, in_group == GROUP, in_group == GROUP + 1
    EACH: tl.constexpr = 2 if IS_GATED else 1  # a query, and perhaps its gate
    query_head = kv_head * GROUP + in_group
    head = kv_head + tl.where(is_key, EACH * GROUP, EACH * GROUP + 1) * NUM_KV_HEADS
    head = tl.where(is_query, EACH * query_head, head)
    source = qkv + (row * ((EACH * GROUP + 2) * NUM_KV_HEADS) + head) * SIZE
    within = column < SIZE
    is_head = (in_group < GROUP + 2) & within
    value = tl.load(source + column, mask=is_head, other=0.0)
    weights += tl.where(is_query, 0, SIZE)
    biases += tl.where(is_query, 0, SIZE)

    own = value.to(tl.float32)
    if BEFORE:
        mean, rate = moments(own, within, epsilon, BEFORE, SIZE)
        own = normed(own, mean, rate, weights + column, biases + column, is_head, BEFORE, dtype)
    if PAIRS > 0:
        is_first, pair, partner = partner_of(column, PAIRS, IS_INTERLEAVED)
        turns = column < 2 * PAIRS
        is_turned = is_head & turns
        other = tl.load(source + partner, mask=is_turned, other=0.0).to(tl.float32)
        if BEFORE:
            other = normed(
                other, mean, rate, weights + partner, biases + partner, is_turned, BEFORE, dtype
            )
        angle = tl.load(positions + row) * PAIRS + pair
        own = turned(own, other, is_first, cosines + angle, sines + angle, turns, dtype)
    if AFTER:
        mean, rate = moments(own, within, epsilon, AFTER, SIZE)
        own = normed(own, mean, rate, weights + column, biases + column, is_head, AFTER, dtype)
    placed = own.to(dtype)

    place = (row * (GROUP * NUM_KV_HEADS) + query_head) * SIZE + column
    tl.store(query + place, placed, mask=is_query & within)
    block = tl.load(write_blocks + row)
    if block >= 0:
        line = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tl.load(write_offsets + row)
        place = tl.broadcast_to(line * SIZE + column, (HEAD_TILE, TILE))
        tl.store(key_cache + place, as_kept(placed, key_cache), mask=is_key & within)
        tl.store(value_cache + place, as_kept(value, value_cache), mask=is_value & within)
