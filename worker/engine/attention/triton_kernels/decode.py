"""Paged attention for decodes: sequences that have one query each.

The query heads that share a KV head are the rows of one tile, so K and V are read only once.
Contexts are cut into parts (see decode_work.py). A Triton program computes some successive parts.
The program that finishes last combines a sequence's parts (Dao and others, "Flash-Decoding for
long-context inference").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.decode_work import FIELDS, MAX_PARTS
from promptq.worker.engine.attention.triton_kernels.common import (
    LOG2_E,
    MAX_KEYS_PER_TILE,
    attend_tile,
    block_ids,
    head_groups,
    keys_per_tile,
    num_processors,
    padded,
    queries_of,
    rows_of,
    scores_of,
    shared_memory_bytes,
    widened,
)
from promptq.worker.engine.attention.types import SpanList

if TYPE_CHECKING:
    from promptq.worker.engine.attention.decode_work import DecodeWork
    from promptq.worker.engine.attention.types import LayerCache, Pattern, Scoring

PROGRAMS_PER_PROCESSOR = 4
"""Programs on a multiprocessor. While one begins or ends a span, the others use the memory."""
NUM_WARPS = 2
_MAX_REGISTERS = 255
"""The most registers of a thread. Without this limit, the compiler may plan for fewer and spill."""
NUM_STAGES = 2
"""Pipeline depth: one tile of K and V is loaded while the previous one is computed. The compiler
can overlap the two only if a tile's block ids are loaded an iteration earlier (see `block_ids`).
More stages, with fewer programs on a multiprocessor, were slower."""
_BESIDE_TILES = 12 * 1024
"""Bytes of shared memory that a program needs in addition to its tiles of K and V."""
MAX_COMBINED = 2048
"""The most numbers that `_combine` adds at a time: 16 per thread. More would spill registers."""

_FIELDS = tl.constexpr(FIELDS)
_MAX_PARTS = tl.constexpr(MAX_PARTS)
_NUM_STAGES = tl.constexpr(NUM_STAGES)


def decode(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    work: DecodeWork,
    spans: SpanList,
    scoring: Scoring,
) -> None:
    """Compute attention of `query` [num_sequences, num_heads, key_size], and write it to `output`.
    For latents, see `head_groups`.

    `spans` is the key of the list to use in `work`. The contexts in this list include the query's
    token. A row with a context of 0 is padding, and its output is zero.
    """
    _, num_heads, query_size = query.shape
    _, _, block_size, value_size = cache.value.shape
    key_size = cache.key.shape[3]
    group, is_latent = head_groups(num_heads, query_size, cache)
    num_kv_heads = num_heads // group
    results = work.results(num_heads, num_kv_heads, value_size)
    head_tile, value_tile = triton.next_power_of_2(group), padded(value_size)
    # More keys would spill registers.
    most, itemsize = MAX_KEYS_PER_TILE, cache.key.element_size()
    if max(key_size, value_size) > 128 or itemsize > 2:
        most //= 4
    elif itemsize < 2:  # 8-bit keys are converted in registers
        most //= 2
    at_once = programs_per_processor(is_latent)
    num_items = work.max_parts * num_kv_heads
    _decode_kernel[(min(num_items, at_once * num_processors(query.device)),)](
        query,
        cache.key,
        cache.value,
        output,
        work.spans(spans),
        results.sums,
        results.log_weights,
        results.num_finished,
        block_tables,
        query if scoring.sinks is None else scoring.sinks,
        scoring.scale,
        scoring.softcap or 1.0,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        num_kv_heads,
        HAS_SOFTCAP=scoring.softcap is not None,
        HAS_SINKS=scoring.sinks is not None,
        IS_LATENT=is_latent,
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_SIZE=block_size,
        HEAD_TILE=padded(group),
        KEY_TILE=padded(key_size),
        VALUE_TILE=value_tile,
        TOKEN_TILE=keys_per_tile(
            cache,
            shared_memory_bytes(query.device) // at_once - _BESIDE_TILES,
            NUM_STAGES - 1,
            most,
        ),
        COMBINED_HEADS=head_tile,
        COMBINED_PARTS=min(MAX_PARTS, max(1, MAX_COMBINED // (head_tile * value_tile))),
        num_warps=NUM_WARPS * PROGRAMS_PER_PROCESSOR // at_once,
        maxnreg=_MAX_REGISTERS,
        num_stages=NUM_STAGES,
    )


def programs_per_processor(is_latent: bool) -> int:
    """Returns the number of programs on a multiprocessor. Latents are larger than other K and V, so
    there are half as many programs, with twice the threads."""
    return PROGRAMS_PER_PROCESSOR // 2 if is_latent else PROGRAMS_PER_PROCESSOR


def span_list(pattern: Pattern, query: torch.Tensor, cache: LayerCache) -> SpanList:
    """Returns the key (for DecodeWork) of the work list for layers with this pattern."""
    _, num_heads, size = query.shape
    group, is_latent = head_groups(num_heads, size, cache)
    programs = programs_per_processor(is_latent) * num_processors(query.device)
    at_once = programs * group // num_heads
    return SpanList(pattern, max(1, at_once))


@triton.jit(do_not_specialize=["table_stride"])  # it differs from step to step
def _decode_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    work: tl.tensor,
    sums: tl.tensor,
    log_weights: tl.tensor,
    num_finished: tl.tensor,
    block_tables: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_LATENT: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    COMBINED_HEADS: tl.constexpr,
    COMBINED_PARTS: tl.constexpr,
) -> None:
    """Computes pairs of a span and a KV head. Each of n programs takes every n-th pair. The number
    of spans is in the list on the device, so a captured launch can compute any list."""
    in_group = tl.arange(0, HEAD_TILE)
    is_head = in_group < GROUP
    key_column = tl.arange(0, KEY_TILE)
    value_column = tl.arange(0, VALUE_TILE)
    is_key_column = key_column[None, :] < KEY_SIZE
    is_value_column = value_column[None, :] < VALUE_SIZE
    written = is_head[:, None] & is_value_column
    num_heads = num_kv_heads * GROUP
    for item in range(tl.program_id(0), tl.load(work) * num_kv_heads, tl.num_programs(0)):
        span = work + (1 + item // num_kv_heads) * _FIELDS
        sequence = tl.load(span).to(tl.int64)
        first_token = tl.load(span + 1)
        last_token = tl.load(span + 2)
        place = tl.load(span + 3).to(tl.int64)
        first_place = tl.load(span + 4).to(tl.int64)
        num_parts = tl.load(span + 5)
        part_tokens = tl.load(span + 6)
        kv_head = item % num_kv_heads
        head = kv_head * GROUP + in_group

        rows = query + sequence * query_row_stride + head[:, None] * query_head_stride
        queries, for_values = queries_of(
            rows, is_head, key_column, value_column, key_cache, KEY_SIZE, VALUE_SIZE, IS_LATENT
        )
        answer = output + (sequence * num_heads + head[:, None]) * VALUE_SIZE + value_column
        highest = tl.full((HEAD_TILE,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((HEAD_TILE,), dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
            highest = tl.where(place == first_place, sink, highest)
            weight = tl.where(place == first_place, 1.0, weight)
        total = tl.zeros((HEAD_TILE, VALUE_TILE), dtype=tl.float32)
        table = block_tables + sequence * table_stride
        block = block_ids(table, first_token + tl.arange(0, TOKEN_TILE), last_token, BLOCK_SIZE)
        part_end = tl.minimum(first_token + part_tokens, last_token)
        for tile in range(first_token, last_token, TOKEN_TILE):
            token = tile + tl.arange(0, TOKEN_TILE)
            is_seen = token < last_token
            line = block if IS_LATENT else block * num_kv_heads + kv_head
            cached = line * BLOCK_SIZE + token % BLOCK_SIZE
            block = block_ids(table, token + TOKEN_TILE, last_token, BLOCK_SIZE)
            key = rows_of(key_cache, cached, key_column, is_seen[:, None] & is_key_column, KEY_SIZE)
            value = rows_of(
                value_cache, cached, value_column, is_seen[:, None] & is_value_column, VALUE_SIZE
            )
            scores = scores_of(
                queries, key, for_values, value, scale, softcap, HAS_SOFTCAP, IS_LATENT
            )
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            highest, weight, total = attend_tile(
                scores, widened(value, queries), highest, weight, total
            )
            if tile + TOKEN_TILE >= part_end:  # the part's last tile; parts have whole tiles
                mean = total / weight[:, None]
                if num_parts == 1:
                    tl.store(answer, mean, mask=written)
                else:
                    row = place * num_heads + head
                    column = row[:, None] * VALUE_SIZE + value_column[None, :]
                    tl.store(sums + column, mean, mask=written)
                    tl.store(log_weights + row, highest + tl.log2(weight), mask=is_head)
                place += 1
                part_end = tl.minimum(part_end + part_tokens, last_token)
                highest = tl.full((HEAD_TILE,), float("-inf"), dtype=tl.float32)
                weight = tl.zeros((HEAD_TILE,), dtype=tl.float32)
                total = tl.zeros((HEAD_TILE, VALUE_TILE), dtype=tl.float32)

        if first_token == last_token:  # a row that pads the batch
            tl.store(answer, tl.zeros((HEAD_TILE, VALUE_TILE), dtype=tl.float32), mask=written)
        if num_parts > 1:
            # All threads have written before one of them counts the parts as finished.
            tl.debug_barrier()
            counter = num_finished + sequence * num_kv_heads + kv_head
            finished = tl.cdiv(last_token - first_token, part_tokens)
            before = tl.atomic_add(counter, finished, sem="acq_rel", scope="gpu")
            if before + finished == num_parts:
                _combine(
                    sums + first_place * num_heads * VALUE_SIZE,
                    log_weights + first_place * num_heads,
                    output + sequence * num_heads * VALUE_SIZE,
                    num_parts,
                    num_heads,
                    kv_head,
                    GROUP,
                    VALUE_SIZE,
                    VALUE_TILE,
                    COMBINED_HEADS,
                    COMBINED_PARTS,
                )
                tl.store(counter, 0)  # for the next launch


@triton.jit
def _combine(
    sums: tl.tensor,
    log_weights: tl.tensor,
    output: tl.tensor,
    num_parts: tl.tensor,
    num_heads: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Combines the parts of one sequence and KV head, in order, and writes the output. Loads bypass
    the first-level cache, because other multiprocessors may have written the parts."""
    in_group = tl.arange(0, HEADS)
    is_head = in_group[None, :] < GROUP
    head = kv_head * GROUP + in_group
    column = tl.arange(0, VALUE_TILE)
    is_column = column < VALUE_SIZE

    place = tl.arange(0, _MAX_PARTS)[:, None] * num_heads + head[None, :]
    is_place = (tl.arange(0, _MAX_PARTS)[:, None] < num_parts) & is_head
    every_log = tl.load(
        log_weights + place, mask=is_place, other=float("-inf"), cache_modifier=".cg"
    )
    highest = tl.max(every_log, 0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.sum(tl.exp2(every_log - origin[None, :]), 0)

    total = tl.zeros((PARTS, HEADS, VALUE_TILE), dtype=tl.float32)
    for first in tl.range(0, num_parts, PARTS, num_stages=_NUM_STAGES):  # to load ahead
        part = first + tl.arange(0, PARTS)
        row = part[:, None] * num_heads + head[None, :]
        is_row = (part[:, None] < num_parts) & is_head
        logs = tl.load(log_weights + row, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        read = tl.load(
            sums + row[:, :, None] * VALUE_SIZE + column[None, None, :],
            mask=is_row[:, :, None] & is_column[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        total += read * tl.exp2(logs - origin[None, :])[:, :, None]
    combined = tl.sum(total, 0) / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(
        output + head[:, None] * VALUE_SIZE + column[None, :],
        combined,
        mask=(in_group < GROUP)[:, None] & is_column[None, :],
    )
