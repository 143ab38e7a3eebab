"""Paged attention for chunks of prompts.

A tile has some successive queries of one chunk, with all query heads that share a KV head.
Positions that all queries of the tile see are computed without masks, other positions with masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.prefill_work import FIELDS
from promptq.worker.engine.attention.triton_kernels.common import (
    CHUNKED,
    LOG2_E,
    MAX_KEYS_PER_TILE,
    SLIDING,
    architecture,
    attend_tile,
    block_ids,
    first_visible,
    head_groups,
    keys_per_tile,
    padded,
    pattern_arguments,
    queries_of,
    rows_of,
    scores_of,
    shared_memory_bytes,
    widened,
)

if TYPE_CHECKING:
    from promptq.worker.engine.attention.prefill_work import PrefillWork
    from promptq.worker.engine.attention.types import LayerCache, Scoring

MAX_QUERY_TILE = 128
"""The most rows of a tile that fit registers. For head sizes over 128, only half as many fit. In
fp32, only a quarter fit."""

NUM_STAGES = 3
"""Pipeline depth: two tiles of K and V are loaded while a third is computed. So a tile's block ids
must be loaded an iteration earlier (see `block_ids`)."""

_FIELDS = tl.constexpr(FIELDS)


def prefill(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    work: PrefillWork,
    scoring: Scoring,
) -> None:
    """Compute attention of the chunks in `query` [T, num_heads, key_size], into `output`. The cache
    already has the K and V of the chunks. For latents, see `head_groups`."""
    _, num_heads, query_size = query.shape
    _, _, block_size, value_size = cache.value.shape
    key_size = cache.key.shape[3]
    group, is_latent = head_groups(num_heads, query_size, cache)
    num_kv_heads = num_heads // group
    itemsize = max(2, cache.key.element_size())  # 8 bits are widened
    most_queries, most_keys = MAX_QUERY_TILE, MAX_KEYS_PER_TILE
    if max(key_size, value_size) > 128:
        most_queries //= 2
    if itemsize >= 4:
        most_queries //= 4
    # More would spill registers. Before capability 9, products take K and V from registers too.
    is_widened = cache.key.element_size() == 1
    if max(key_size, value_size) > 128 or is_widened or architecture(query.device) < 90:
        most_keys //= 2
    if is_latent:
        most_keys = 16
        most_queries //= 2 if is_widened else 1
    query_tile = max(padded(group), min(most_queries, padded(work.longest_chunk * group)))
    tiles = work.tiles(query_tile // group)
    _prefill_kernel[(tiles.shape[0], num_kv_heads)](
        query,
        cache.key,
        cache.value,
        output,
        block_tables,
        tiles,
        query if scoring.sinks is None else scoring.sinks,
        scoring.scale,
        scoring.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        num_kv_heads,
        **pattern_arguments(scoring.pattern),
        HAS_SOFTCAP=scoring.softcap is not None,
        HAS_SINKS=scoring.sinks is not None,
        IS_LATENT=is_latent,
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_SIZE=block_size,
        QUERY_TILE=query_tile,
        KEY_TILE=padded(key_size),
        VALUE_TILE=padded(value_size),
        TOKEN_TILE=keys_per_tile(
            cache,
            shared_memory_bytes(query.device) - query_tile * padded(key_size) * itemsize,
            NUM_STAGES,
            most_keys,
        ),
        num_warps=8 if query_tile >= 128 or is_latent else 4,
        num_stages=NUM_STAGES,
    )


@triton.jit(do_not_specialize=["table_stride"])  # it differs from step to step
def _prefill_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    block_tables: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    pattern_size: tl.tensor,
    PATTERN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_LATENT: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
) -> None:
    tile = tiles + tl.program_id(0) * _FIELDS
    kv_head = tl.program_id(1)
    sequence = tl.load(tile).to(tl.int64)
    first_row = tl.load(tile + 1).to(tl.int64)
    num_rows = tl.load(tile + 2)
    first_position = tl.load(tile + 3)

    in_tile = tl.arange(0, QUERY_TILE)
    offset = in_tile // GROUP
    is_query = offset < num_rows
    head = kv_head * GROUP + in_tile % GROUP
    position = first_position + offset
    key_column = tl.arange(0, KEY_TILE)
    value_column = tl.arange(0, VALUE_TILE)
    is_key_column = key_column[None, :] < KEY_SIZE
    is_value_column = value_column[None, :] < VALUE_SIZE
    rows = query + (first_row + offset) * query_row_stride + head * query_head_stride
    queries, for_values = queries_of(
        rows[:, None],
        is_query,
        key_column,
        value_column,
        key_cache,
        KEY_SIZE,
        VALUE_SIZE,
        IS_LATENT,
    )

    highest = tl.full((QUERY_TILE,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((QUERY_TILE,), dtype=tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        weight = tl.full((QUERY_TILE,), 1.0, dtype=tl.float32)
    total = tl.zeros((QUERY_TILE, VALUE_TILE), dtype=tl.float32)

    table = block_tables + sequence * table_stride
    start = first_visible(first_position, pattern_size, PATTERN)
    end = first_position + num_rows
    middle = start
    block = block_ids(table, start + tl.arange(0, TOKEN_TILE), end, BLOCK_SIZE)
    if PATTERN == 0:
        middle = (first_position + 1) // TOKEN_TILE * TOKEN_TILE
        for first_token in range(start, middle, TOKEN_TILE):
            token = first_token + tl.arange(0, TOKEN_TILE)
            line = block if IS_LATENT else block * num_kv_heads + kv_head
            place = line * BLOCK_SIZE + token % BLOCK_SIZE
            block = block_ids(table, token + TOKEN_TILE, end, BLOCK_SIZE)
            key = rows_of(key_cache, place, key_column, is_key_column, KEY_SIZE)
            value = rows_of(value_cache, place, value_column, is_value_column, VALUE_SIZE)
            scores = scores_of(
                queries, key, for_values, value, scale, softcap, HAS_SOFTCAP, IS_LATENT
            )
            highest, weight, total = attend_tile(
                scores, widened(value, queries), highest, weight, total
            )
    for first_token in range(middle, end, TOKEN_TILE):
        token = first_token + tl.arange(0, TOKEN_TILE)
        is_seen = token < end
        line = block if IS_LATENT else block * num_kv_heads + kv_head
        place = line * BLOCK_SIZE + token % BLOCK_SIZE
        block = block_ids(table, token + TOKEN_TILE, end, BLOCK_SIZE)
        key = rows_of(key_cache, place, key_column, is_seen[:, None] & is_key_column, KEY_SIZE)
        value = rows_of(
            value_cache, place, value_column, is_seen[:, None] & is_value_column, VALUE_SIZE
        )
        visible = token[None, :] <= position[:, None]
        if PATTERN == SLIDING:
            visible = visible & (token[None, :] > position[:, None] - pattern_size)
        if PATTERN == CHUNKED:
            visible = visible & (
                token[None, :] // pattern_size == position[:, None] // pattern_size
            )
        scores = scores_of(queries, key, for_values, value, scale, softcap, HAS_SOFTCAP, IS_LATENT)
        scores = tl.where(visible, scores, float("-inf"))
        highest, weight, total = attend_tile(
            scores, widened(value, queries), highest, weight, total
        )

    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    place = ((first_row + offset) * num_kv_heads * GROUP + head) * VALUE_SIZE
    tl.store(
        output + place[:, None] + value_column[None, :],
        total,
        mask=is_query[:, None] & is_value_column,
    )
