"""Paged attention in plain torch, the backend for all devices.

Decodes are computed in padded groups, and chunks one by one. Padding points to the first visible
token of the same sequence, so no memory of other sequences is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from promptq.worker.engine.attention.backend import AttentionBackend
from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring, StepLayout

MAX_GATHERED_TOKENS = 1 << 16
"""The most context tokens, with padding, in a group of decodes. Limits the copies of K and V."""
MAX_SCORES = 1 << 24
"""The most attention scores in memory at a time, if `_attend_explicitly` computes the softmax."""


class TorchPaged(AttentionBackend):
    name = "torch"
    devices = frozenset({"cpu", "cuda"})

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        layout: StepLayout,
        scoring: Scoring,
    ) -> torch.Tensor:
        cache.key[layout.write_blocks, :, layout.write_offsets] = key
        cache.value[layout.write_blocks, :, layout.write_offsets] = value

        num_kv_heads, value_size = value.shape[1:]
        output = value.new_empty(query.shape[0], query.shape[1], value_size)
        for part in _plan(layout, scoring.pattern, num_kv_heads, key):
            rows = slice(part.first, part.last)
            if part.cache_rows is None:
                keys, values = key[rows].transpose(0, 1)[None], value[rows].transpose(0, 1)[None]
            else:
                keys, values = (_gather(each, part.cache_rows) for each in (cache.key, cache.value))
            if part.is_chunk:
                queries = query[rows].transpose(0, 1)[None]
                output[rows] = _attend(queries, keys, values, part.bias, scoring)[0].transpose(0, 1)
            else:
                queries = query[rows].unsqueeze(2)
                output[rows] = _attend(queries, keys, values, part.bias, scoring).squeeze(2)
        return output


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `first` to `last`, computed together: a chunk, or decodes with similar contexts."""

    first: int
    last: int
    cache_rows: torch.Tensor | None
    """[sequences, num_kv_heads, length], see `_cache_rows`. None if only new tokens are visible."""
    bias: torch.Tensor | None
    """-inf where a row does not see a position, otherwise 0: [sequences, 1, 1, length] for decodes,
    [rows, length] for a chunk. None if decodes see all positions, or if a chunk is plain causal."""
    is_chunk: bool = False


def _plan(
    layout: StepLayout, pattern: Pattern, num_kv_heads: int, like: torch.Tensor
) -> list[_Part]:
    """Returns the step's parts. They are planned once for each pattern, head count and dtype."""
    key = (pattern, num_kv_heads, like.dtype)
    if key not in layout.plans:
        heads = torch.arange(num_kv_heads, device=like.device)
        layout.plans[key] = [
            *_plan_decodes(layout, pattern, heads, like.dtype),
            *_plan_chunks(layout, pattern, heads, like.dtype),
        ]
    parts: list[_Part] = layout.plans[key]
    return parts


def _plan_decodes(
    layout: StepLayout, pattern: Pattern, heads: torch.Tensor, dtype: torch.dtype
) -> list[_Part]:
    contexts = layout.context_lens[: layout.num_decodes]
    starts = [pattern.first_visible(context - 1) for context in contexts]
    lengths = [context - start for context, start in zip(contexts, starts, strict=True)]
    parts = []
    for first, last in _similar(lengths):
        longest = max(lengths[first:last])
        start = torch.tensor(starts[first:last], device=heads.device).unsqueeze(1)
        offset = torch.arange(longest, device=heads.device)
        bias = None
        if min(lengths[first:last]) < longest:
            length = torch.tensor(lengths[first:last], device=heads.device).unsqueeze(1)
            seen = offset < length
            offset = torch.where(seen, offset, 0)
            bias = _bias(seen, dtype)[:, None, None, :]
        positions = (start + offset).expand(last - first, longest)
        cache_rows = _cache_rows(layout.block_tables[first:last], positions, heads, layout)
        parts.append(_Part(first, last, cache_rows, bias))
    return parts


def _similar(lengths: list[int]) -> list[tuple[int, int]]:
    """Groups decodes of similar lengths. Returns the range (first, end) of each group. No group is
    mostly padding, and no group of several decodes has more than MAX_GATHERED_TOKENS."""
    groups = []
    first, longest = 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        padded = (index + 1 - first) * longest
        wasteful = length < longest // 4 and longest > 256
        if index > first and (padded > MAX_GATHERED_TOKENS or wasteful):
            groups.append((first, index))
            first, longest = index, length
    if lengths:
        groups.append((first, len(lengths)))
    return groups


def _plan_chunks(
    layout: StepLayout, pattern: Pattern, heads: torch.Tensor, dtype: torch.dtype
) -> list[_Part]:
    chunks = []
    for index in range(layout.num_decodes, len(layout.context_lens)):
        first, last = layout.query_starts[index], layout.query_starts[index + 1]
        context = layout.context_lens[index]
        position = context - (last - first)
        start = pattern.first_visible(position)
        cache_rows = None
        if start < position:
            positions = torch.arange(start, context, device=heads.device).unsqueeze(0)
            tables = layout.block_tables[index : index + 1]
            cache_rows = _cache_rows(tables, positions, heads, layout)
        bias = None
        if start < position or pattern.first_visible(context - 1) > start:
            query = torch.arange(position, context, device=heads.device).unsqueeze(1)
            key = torch.arange(start, context, device=heads.device)
            bias = _bias(_visible(query, key, pattern), dtype)
        chunks.append(_Part(first, last, cache_rows, bias, is_chunk=True))
    return chunks


def _visible(query: torch.Tensor, key: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Returns booleans [queries, keys]: whether a query, by its position, sees a key."""
    visible = key <= query
    if pattern.kind == "sliding":
        visible &= key > query - pattern.size
    elif pattern.kind == "chunked":
        visible &= key // pattern.size == query // pattern.size
    return visible


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask as numbers that are added to scores: 0 if visible, -inf otherwise."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))


def _cache_rows(
    tables: torch.Tensor, positions: torch.Tensor, heads: torch.Tensor, layout: StepLayout
) -> torch.Tensor:
    """Returns [sequences, num_kv_heads, length]: row numbers in the cache as [rows, head size]."""
    size = layout.block_size
    blocks = tables.gather(1, positions // size)
    per_head = blocks.unsqueeze(1) * len(heads) + heads.unsqueeze(1)
    return per_head * size + (positions % size).unsqueeze(1)


def _gather(cache: torch.Tensor, cache_rows: torch.Tensor) -> torch.Tensor:
    """Returns rows of the paged cache as [sequences, num_kv_heads, length, head size]."""
    rows = cache.view(-1, cache.shape[-1]).index_select(0, cache_rows.view(-1))
    return rows.view(*cache_rows.shape, cache.shape[-1])


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Returns [size, num_heads, rows, value_size] for queries [size, num_heads, rows, key_size].

    Without a bias, a single row sees all keys. With several rows, there are as many keys as rows,
    and attention is causal.
    """
    if scoring.softcap is not None or scoring.sinks is not None:
        return _attend_explicitly(query, keys, values, bias, scoring)
    size, num_heads, rows, key_size = query.shape
    num_kv_heads = keys.shape[1]
    grouped = num_heads != num_kv_heads
    if rows == 1 and grouped:
        # The heads of a group share their keys. As rows they need no repeated keys.
        query = query.reshape(size, num_kv_heads, -1, key_size)
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], query.shape[2], -1)
    attended = scaled_dot_product_attention(
        query.to(keys.dtype),
        keys,
        values,
        attn_mask=bias,
        scale=scoring.scale,
        is_causal=bias is None and rows > 1,
        enable_gqa=rows > 1 and grouped,
    )
    return attended.reshape(size, num_heads, rows, -1)


def _attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Returns the result of `_attend` with softcap and sinks, which torch's kernels lack."""
    size, num_heads, rows, key_size = query.shape
    num_kv_heads, length = keys.shape[1:3]
    if bias is None and rows > 1:
        bias = _bias(query.new_ones(rows, length, dtype=torch.bool).tril(), torch.float32)
    query = query.reshape(size, num_kv_heads, -1, rows, key_size)
    keys, values = keys.unsqueeze(2).transpose(-1, -2), values.unsqueeze(2)
    tile = max(1, MAX_SCORES // (size * num_heads * length))
    tiles = []
    for first in range(0, rows, tile):
        seen_from = slice(first, first + tile)
        scores = (query[..., seen_from, :] @ keys).float() * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if bias is not None:
            scores += bias.unsqueeze(-3)[..., seen_from, :]
        if scoring.sinks is not None:
            sinks = scoring.sinks.float().view(num_kv_heads, -1, 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        tiles.append(weights.to(values.dtype) @ values)
    return torch.cat(tiles, dim=-2).reshape(size, num_heads, rows, -1)
