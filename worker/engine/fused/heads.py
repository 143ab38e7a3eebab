"""Makes the heads ready for attention as one kernel: their norms, the rotation, K and V written.

Rounded where the library's modules round: after each operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.fused.norm import rounded

if TYPE_CHECKING:
    from promptq.worker.engine.attention.backend import LayerCache, StepLayout


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of all layers (RoFormer, as Llama lays it out)."""

    cosine: torch.Tensor  # [positions, rotary size], in the model's dtype
    sine: torch.Tensor  # the same


def place_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: Rotary,
    norms: torch.Tensor | None,
    epsilon: float,
    cache: LayerCache,
    layout: StepLayout,
) -> torch.Tensor:
    """The queries [T, num_heads, head size], and K and V are in the cache.

    `qkv` [T, (num_heads + 2 * num_kv_heads) * head size] is what the projections give, and `norms`
    [2, head size] are the weights of the query's and the key's norm, if they have one. `positions`
    are [T]. Rows whose block is -1 pad the step: their K and V are written nowhere.
    """
    num_rows = len(qkv)
    _, num_kv_heads, block_size, size = cache.key.shape
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    query = qkv.new_empty(num_rows, num_heads, size)
    _place_heads_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
        qkv,
        positions,
        rotary.cosine,
        rotary.sine,
        qkv if norms is None else norms,
        epsilon,
        query,
        cache.key,
        cache.value,
        layout.write_blocks,
        layout.write_offsets,
        HAS_NORMS=norms is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        SIZE=size,
        TILE=triton.next_power_of_2(size),
        ROTARY_SIZE=rotary.cosine.shape[1],
        BLOCK_SIZE=block_size,
        num_warps=1,
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program for each row and head: the query's, then the key's, then the value's."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, TILE)
    within = column < SIZE
    source = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * SIZE
    own = tl.load(source + column, mask=within, other=0.0).to(tl.float32)

    if head < NUM_HEADS + NUM_KV_HEADS:
        # Each column turns with a partner, half a rotation away.
        is_first = column < ROTARY_SIZE // 2
        turns = column < ROTARY_SIZE
        partner = tl.where(is_first, column + ROTARY_SIZE // 2, column - ROTARY_SIZE // 2)
        other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
        if HAS_NORMS:
            weights = norms + tl.where(head < NUM_HEADS, 0, SIZE)
            rate = tl.rsqrt(tl.sum(own * own, 0) / SIZE + epsilon)
            own_weight = tl.load(weights + column, mask=within, other=0.0).to(tl.float32)
            other_weight = tl.load(weights + partner, mask=turns, other=0.0).to(tl.float32)
            own = rounded(rounded(own * rate, qkv) * own_weight, qkv)
            other = rounded(rounded(other * rate, qkv) * other_weight, qkv)
        place = tl.load(positions + row) * ROTARY_SIZE + column
        cosine = tl.load(cosines + place, mask=turns, other=1.0).to(tl.float32)
        sine = tl.load(sines + place, mask=turns, other=0.0).to(tl.float32)
        signed = tl.where(is_first, -other, other)
        own = rounded(own * cosine, qkv) + rounded(signed * sine, qkv)

    if head < NUM_HEADS:
        tl.store(query + (row * NUM_HEADS + head) * SIZE + column, own, mask=within)
    else:
        block = tl.load(write_blocks + row)
        if block >= 0:
            kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
            line = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tl.load(write_offsets + row)
            if head < NUM_HEADS + NUM_KV_HEADS:
                tl.store(key_cache + line * SIZE + column, own, mask=within)
            else:
                tl.store(value_cache + line * SIZE + column, own, mask=within)
