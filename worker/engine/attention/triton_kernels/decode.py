"""Attention of sequences that have one query each, over the block table.

The heads of a group are the rows of one tile, so K and V are read once for all of them. Long
contexts are split among programs, and a second kernel puts the parts together (Dao and others,
"Flash-Decoding for long-context inference").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import (
    LOG2_E,
    NUM_STAGES,
    attend_tile,
    block_ids,
    first_visible,
    keys_per_tile,
    num_processors,
    padded,
    pattern_arguments,
    scores_of,
    shared_memory_bytes,
)

if TYPE_CHECKING:
    from promptq.worker.engine.attention.backend import LayerCache, Scoring

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128
"""A shorter part is not worth a program of its own."""
PROGRAMS_PER_PROCESSOR = 4
"""So many programs keep enough reads under way to use the whole memory bandwidth."""


def decode(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    longest_context: int,
    scoring: Scoring,
) -> None:
    """Attend from `query` [num_sequences, num_heads, key_size] into `output`.

    `context_lens` [num_sequences], int32, include the query's own token. A row whose length is 0
    is padding, and its output is zero. `longest_context` only limits how finely contexts are
    split, so it may be an upper bound where a step is replayed for other lengths.
    """
    num_sequences, num_heads, key_size = query.shape
    _, num_kv_heads, block_size, value_size = cache.value.shape
    group = num_heads // num_kv_heads
    num_splits = splits_for(num_sequences * num_kv_heads, longest_context, query.device)
    parts, part_weights = output, output
    if num_splits > 1:
        shape = (num_sequences, num_heads, num_splits)
        parts = query.new_empty(*shape, value_size, dtype=torch.float32)
        part_weights = query.new_empty(*shape, dtype=torch.float32)
    _decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        query,
        cache.key,
        cache.value,
        output,
        parts,
        part_weights,
        block_tables,
        context_lens,
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
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        HEAD_TILE=padded(group),
        KEY_TILE=padded(key_size),
        VALUE_TILE=padded(value_size),
        TOKEN_TILE=keys_per_tile(
            cache,
            # Not all of it, so that a processor can hold more than one program.
            shared_memory_bytes(query.device) * 2 // 3,
        ),
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    if num_splits > 1:
        _reduce_kernel[(num_sequences, num_heads)](
            parts,
            part_weights,
            output,
            num_heads,
            VALUE_SIZE=value_size,
            VALUE_TILE=padded(value_size),
            NUM_SPLITS=num_splits,
            num_warps=4,
        )


def splits_for(num_programs: int, longest_context: int, device: torch.device) -> int:
    """How many parts to split contexts into so that the device is busy: a power of two."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device) // num_programs
    most = min(wanted, longest_context // MIN_SPLIT_TOKENS, MAX_SPLITS)
    return 1 << max(0, most.bit_length() - 1)


@triton.jit(do_not_specialize=["table_stride"])  # it differs from step to step
def _decode_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,
    part_weights: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
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
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
) -> None:
    """One program for each sequence, KV head, and part of the context."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + sequence)
    start = first_visible(tl.maximum(context - 1, 0), pattern_size, PATTERN)
    share = tl.cdiv(tl.cdiv(context - start, NUM_SPLITS), TOKEN_TILE) * TOKEN_TILE
    first_token = start + split * share
    last_token = tl.minimum(first_token + share, context)

    in_group = tl.arange(0, HEAD_TILE)
    is_head = in_group < GROUP
    head = kv_head * GROUP + in_group
    key_column = tl.arange(0, KEY_TILE)
    value_column = tl.arange(0, VALUE_TILE)
    is_key_column = key_column[None, :] < KEY_SIZE
    is_value_column = value_column[None, :] < VALUE_SIZE
    rows = query + sequence * query_row_stride + head[:, None] * query_head_stride
    queries = tl.load(
        rows + key_column[None, :], mask=is_head[:, None] & is_key_column, other=0.0
    ).to(key_cache.dtype.element_ty)

    highest = tl.full((HEAD_TILE,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((HEAD_TILE,), dtype=tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where(split == 0, sink, highest)
        weight = tl.where(split == 0, 1.0, weight)
    total = tl.zeros((HEAD_TILE, VALUE_TILE), dtype=tl.float32)
    table = block_tables + sequence * table_stride
    block = block_ids(table, first_token + tl.arange(0, TOKEN_TILE), last_token, BLOCK_SIZE)
    for tile in range(first_token, last_token, TOKEN_TILE):
        token = tile + tl.arange(0, TOKEN_TILE)
        is_seen = token < last_token
        place = (block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
        block = block_ids(table, token + TOKEN_TILE, last_token, BLOCK_SIZE)
        key = tl.load(
            key_cache + place[:, None] * KEY_SIZE + key_column[None, :],
            mask=is_seen[:, None] & is_key_column,
            other=0.0,
        )
        value = tl.load(
            value_cache + place[:, None] * VALUE_SIZE + value_column[None, :],
            mask=is_seen[:, None] & is_value_column,
            other=0.0,
        )
        scores = scores_of(queries, key, scale, softcap, HAS_SOFTCAP)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        highest, weight, total = attend_tile(scores, value, highest, weight, total)

    # The sums are empty in parts after the context's end and in padding rows.
    is_empty = weight == 0.0
    total = total / tl.where(is_empty, 1.0, weight)[:, None]
    num_heads = num_kv_heads * GROUP
    written = is_head[:, None] & is_value_column
    if NUM_SPLITS == 1:
        place = (sequence * num_heads + head) * VALUE_SIZE
        tl.store(output + place[:, None] + value_column[None, :], total, mask=written)
    else:
        part = (sequence * num_heads + head) * NUM_SPLITS + split
        place = part * VALUE_SIZE
        tl.store(parts + place[:, None] + value_column[None, :], total, mask=written)
        safe = tl.where(is_empty, 1.0, weight)
        log_weight = tl.where(is_empty, float("-inf"), highest + tl.log2(safe))
        tl.store(part_weights + part, log_weight, mask=is_head)


@triton.jit
def _reduce_kernel(
    parts: tl.tensor,
    part_weights: tl.tensor,
    output: tl.tensor,
    num_heads: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    """One program for each sequence and head."""
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, NUM_SPLITS)
    column = tl.arange(0, VALUE_TILE)
    is_column = column < VALUE_SIZE
    log_weights = tl.load(part_weights + row * NUM_SPLITS + split)
    highest = tl.max(log_weights, 0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(log_weights - origin)
    place = (row * NUM_SPLITS + split) * VALUE_SIZE
    read = tl.load(parts + place[:, None] + column[None, :], mask=is_column[None, :], other=0.0)
    sum_of_weights = tl.sum(weights, 0)
    total = tl.sum(read * weights[:, None], 0) / tl.where(sum_of_weights == 0, 1.0, sum_of_weights)
    tl.store(output + row * VALUE_SIZE + column, total, mask=is_column)
