"""Prepares heads for attention in one kernel: norms, rotation, and writing K and V.

The kernel rounds where the library's modules round: after each operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import as_kept

if TYPE_CHECKING:
    from promptq.worker.engine.attention.types import LayerCache, StepLayout


def place_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: torch.Tensor | None,
    epsilon: float,
    cache: LayerCache,
    layout: StepLayout,
) -> torch.Tensor:
    """Returns the queries [T, num_heads, head size], and writes K and V to the cache.

    `qkv` [T, (num_heads + 2 * num_kv_heads) * head size] is the output of the projections, and
    `positions` are [T]. `cosine` and `sine` [positions, rotary size], in the model's dtype, rotate
    heads (RoFormer, as Llama lays it out). `norms` [2, head size] are the weights of the query's
    and the key's norm, if they have one. Rows whose block is -1 pad the step: their K and V are not
    written.
    """
    num_rows = len(qkv)
    _, num_kv_heads, block_size, size = cache.key.shape
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    head_tile, tile = triton.next_power_of_2(group + 2), triton.next_power_of_2(size)
    query = qkv.new_empty(num_rows, num_heads, size)
    _place_heads_kernel[(num_rows, num_kv_heads)](
        qkv,
        positions,
        cosine,
        sine,
        qkv if norms is None else norms,
        epsilon,
        query,
        cache.key,
        cache.value,
        layout.write_blocks,
        layout.write_offsets,
        HAS_NORMS=norms is not None,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        SIZE=size,
        ROTARY_SIZE=cosine.shape[1],
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        TILE=tile,
        num_warps=min(16, max(1, head_tile * tile // 256)),
    )
    return query


@triton.jit
def _place_heads_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    norms: tl.tensor,
    epsilon: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    write_blocks: tl.tensor,
    write_offsets: tl.tensor,
    HAS_NORMS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program for each row and KV head: its group of query heads, its key and its value."""
    dtype = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    in_group = tl.arange(0, HEAD_TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    is_query, is_key, is_value = in_group < GROUP, in_group == GROUP, in_group == GROUP + 1
    head = kv_head + tl.where(is_key, GROUP * NUM_KV_HEADS, (GROUP + 1) * NUM_KV_HEADS)
    head = tl.where(is_query, kv_head * GROUP + in_group, head)
    within, turns = column < SIZE, column < ROTARY_SIZE
    source = qkv + (row * ((GROUP + 2) * NUM_KV_HEADS) + head) * SIZE
    is_head = in_group < GROUP + 2
    value = tl.load(source + column, mask=is_head & within, other=0.0)

    # Each column is rotated with a partner in the other half of the rotated columns.
    is_first = column < ROTARY_SIZE // 2
    partner = tl.where(is_first, column + ROTARY_SIZE // 2, column - ROTARY_SIZE // 2)
    own = value.to(tl.float32)
    other = tl.load(source + partner, mask=is_head & turns, other=0.0).to(tl.float32)
    if HAS_NORMS:
        rate = tl.rsqrt(tl.sum(own * own, 1) / SIZE + epsilon)[:, None]
        weights = norms + tl.where(is_query, 0, SIZE)
        own_weight = tl.load(weights + column, mask=is_head & within, other=0.0).to(tl.float32)
        other_weight = tl.load(weights + partner, mask=is_head & turns, other=0.0).to(tl.float32)
        own = ((own * rate).to(dtype).to(tl.float32) * own_weight).to(dtype).to(tl.float32)
        other = ((other * rate).to(dtype).to(tl.float32) * other_weight).to(dtype).to(tl.float32)
    angle = tl.load(positions + row) * ROTARY_SIZE + column
    cosine = tl.load(cosines + angle, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=turns, other=0.0).to(tl.float32)
    straight = (own * cosine).to(dtype).to(tl.float32)
    across = (tl.where(is_first, -other, other) * sine).to(dtype).to(tl.float32)
    turned = (straight + across).to(dtype)

    place = (row * (GROUP * NUM_KV_HEADS) + head) * SIZE + column
    tl.store(query + place, turned, mask=is_query & within)
    block = tl.load(write_blocks + row)
    if block >= 0:
        line = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tl.load(write_offsets + row)
        place = tl.broadcast_to(line * SIZE + column, (HEAD_TILE, TILE))
        tl.store(key_cache + place, as_kept(turned, key_cache), mask=is_key & within)
        tl.store(value_cache + place, as_kept(value, value_cache), mask=is_value & within)
