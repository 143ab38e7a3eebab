"""Latent attention in fused kernels, in the absorbed form (DeepSeek-V2, appendix C).

The cache has one latent and one rotated key for each token. Queries and outputs are multiplied by
the weights that would compute keys and values from latents. So all heads read the same latents.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.packed_step import PackedStep
from promptq.worker.engine.attention.triton_kernels.common import as_kept
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring
from promptq.worker.engine.decoders.kernels.heads import partner_of, turned
from promptq.worker.engine.decoders.kernels.linear import fused
from promptq.worker.engine.decoders.kernels.norm import add_norm, code_of, moments, normed
from promptq.worker.engine.decoders.latent_parts import LatentAttention
from promptq.worker.engine.decoders.rotation_parts import RotationTables

_HEAD_TILE = 16


class FusedLatentAttention:
    """A layer with latent attention, from rows [T, hidden size] to rows of the same shape."""

    def __init__(
        self,
        parts: LatentAttention,
        tables: RotationTables | None,
        cache: LayerCache,
        pattern: Pattern,
        backend: TritonPaged,
    ) -> None:
        self._parts, self._tables, self._cache, self._backend = parts, tables, cache, backend
        self._inputs, self._output = fused(*parts.inputs), fused(parts.output)
        self._query_up = None if parts.query_up is None else fused(parts.query_up)
        self._keys, self._values = parts.weights()
        self._scoring = Scoring(parts.scale, pattern)

    def __call__(self, x: torch.Tensor, step: PackedStep) -> torch.Tensor:
        parts, projected = self._parts, self._inputs(x)
        width = parts.inputs[0].out_features
        query, latent = projected[:, :width], projected[:, width:]
        if self._query_up is not None:
            query = self._query_up(add_norm(query, None, parts.query_norm))
        heads = query.view(len(x), parts.num_heads, -1)
        placed = self.place(heads, latent, step)
        rank = self._keys.shape[2]
        absorbed = placed[..., :rank].transpose(0, 1)
        torch.bmm(heads[..., : parts.key_size].transpose(0, 1), self._keys, out=absorbed)
        attended = self._backend.attend_written(placed, self._cache, step.layout, self._scoring)
        output = x.new_empty(len(x), parts.num_heads, self._values.shape[1])
        values = self._values.transpose(1, 2)
        torch.bmm(attended.transpose(0, 1), values, out=output.transpose(0, 1))
        return self._output(output.flatten(1))

    def place(self, heads: torch.Tensor, latent: torch.Tensor, step: PackedStep) -> torch.Tensor:
        """Returns queries [T, num_heads, rank + rotated size], in which only the rotated numbers
        are set. Writes the normalised latents and the rotated keys to the cache.

        `heads` is [T, num_heads, key size + rotated size], `latent` [T, rank + rotated size].
        """
        parts, tables, cache, norm = self._parts, self._tables, self._cache, self._parts.norm
        _, _, block_size, rank = cache.value.shape
        num_heads, size = parts.num_heads, parts.rotated_size
        query = heads.new_empty(len(heads), num_heads, rank + size)
        tile = triton.next_power_of_2(size)
        _place_latent_kernel[(len(heads), 1 + triton.cdiv(num_heads, _HEAD_TILE))](
            heads,
            latent,
            step.positions[0],
            heads if tables is None else tables.cosine,
            heads if tables is None else tables.sine,
            norm.weight,
            latent if norm.bias is None else norm.bias,
            norm.epsilon,
            query,
            cache.key,
            cache.value,
            step.layout.write_blocks,
            step.layout.write_offsets,
            heads.stride(0),
            latent.stride(0),
            NORM=code_of(norm),
            PAIRS=0 if tables is None else tables.cosine.shape[1],
            IS_INTERLEAVED=parts.is_interleaved,
            NUM_HEADS=num_heads,
            KEY_SIZE=parts.key_size,
            SIZE=size,
            RANK=rank,
            BLOCK_SIZE=block_size,
            HEAD_TILE=_HEAD_TILE,
            TILE=tile,
            RANK_TILE=triton.next_power_of_2(rank),
            num_warps=4,
        )
        return query


@triton.jit
def _place_latent_kernel(
    heads: tl.tensor,
    latents: tl.tensor,
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
    head_stride: tl.tensor,
    latent_stride: tl.tensor,
    NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
) -> None:
    """The first program of a row writes the cache. Each of the others rotates some queries."""
    dtype = heads.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    is_query = tl.program_id(1) > 0
    in_tile, column = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, TILE)[None, :]
    head = (tl.program_id(1) - 1) * HEAD_TILE + in_tile
    within = column < SIZE
    is_head = tl.where(is_query, head < NUM_HEADS, in_tile == 0) & within
    if is_query:
        source = heads + row * head_stride + head * (KEY_SIZE + SIZE) + KEY_SIZE
    else:
        source = latents + row * latent_stride + RANK + 0 * in_tile
    own = tl.load(source + column, mask=is_head, other=0.0).to(tl.float32)
    if PAIRS > 0:
        is_first, pair, partner = partner_of(column, PAIRS, IS_INTERLEAVED)
        other = tl.load(source + partner, mask=is_head, other=0.0).to(tl.float32)
        angle = tl.load(positions + row) * PAIRS + pair
        own = turned(own, other, is_first, cosines + angle, sines + angle, within, dtype)
    if is_query:
        target = query + (row * NUM_HEADS + head) * (RANK + SIZE) + RANK
        tl.store(target + column, own, mask=is_head)
        return
    block = tl.load(write_blocks + row)
    if block >= 0:
        line = block * BLOCK_SIZE + tl.load(write_offsets + row)
        key_place = tl.broadcast_to(line * SIZE + column, (HEAD_TILE, TILE))
        tl.store(key_cache + key_place, as_kept(own.to(dtype), key_cache), mask=is_head)
        number = tl.arange(0, RANK_TILE)[None, :]
        is_number = number < RANK
        latent = tl.load(latents + row * latent_stride + number, mask=is_number, other=0.0)
        latent = latent.to(tl.float32)
        mean, rate = moments(latent, is_number, epsilon, NORM, RANK)
        latent = normed(
            latent, mean, rate, weights + number, biases + number, is_number, NORM, dtype
        )
        place = line * RANK + number
        tl.store(value_cache + place, as_kept(latent.to(dtype), value_cache), mask=is_number)
