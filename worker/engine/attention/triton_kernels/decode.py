"""Attention of sequences that have one query each, over the block table.

The heads of a group are the rows of one tile, so K and V are read once for all of them. Contexts
are cut into parts (see decode_work.py), and the program that finishes the last part of a sequence
puts the parts together (Dao and others, "Flash-Decoding for long-context inference").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.decode_work import FIELDS, MAX_PARTS
from promptq.worker.engine.attention.triton_kernels.common import (
    LOG2_E,
    NUM_STAGES,
    attend_tile,
    block_ids,
    keys_per_tile,
    num_processors,
    padded,
    scores_of,
    shared_memory_bytes,
)

if TYPE_CHECKING:
    from promptq.worker.engine.attention.backend import LayerCache, Scoring
    from promptq.worker.engine.attention.decode_work import DecodeWork

_MAX_REGISTERS = 240
"""Of a thread: with so many, as many programs as are planned for still fit on a processor. Without
this bound the compiler aims at one more, and spills."""
PROGRAMS_PER_PROCESSOR = 2
"""While one of them starts or ends a part, the other one keeps the memory busy."""
MAX_COMBINED = 2048
"""How many numbers of parts are combined at once: 16 in each thread, and no register is spilled."""

_FIELDS = tl.constexpr(FIELDS)
_MAX_PARTS = tl.constexpr(MAX_PARTS)
_NUM_STAGES = tl.constexpr(NUM_STAGES)


def decode(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    work: DecodeWork,
    scoring: Scoring,
) -> None:
    """Attend from `query` [num_sequences, num_heads, key_size] into `output`.

    The contexts of `work` include the query's own token. A row whose context is 0 is padding, and
    its output is zero.
    """
    _, num_heads, key_size = query.shape
    _, num_kv_heads, block_size, value_size = cache.value.shape
    group = num_heads // num_kv_heads
    results = work.results(num_heads, num_kv_heads, value_size)
    head_tile, value_tile = triton.next_power_of_2(group), padded(value_size)
    _decode_kernel[(num_programs(work.max_parts * num_kv_heads, query.device),)](
        query,
        cache.key,
        cache.value,
        output,
        work.parts(scoring.pattern),
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
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_SIZE=block_size,
        HEAD_TILE=padded(group),
        KEY_TILE=padded(key_size),
        VALUE_TILE=value_tile,
        TOKEN_TILE=keys_per_tile(
            cache, shared_memory_bytes(query.device) // PROGRAMS_PER_PROCESSOR
        ),
        COMBINED_HEADS=head_tile,
        COMBINED_PARTS=min(MAX_PARTS, max(1, MAX_COMBINED // (head_tile * value_tile))),
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
        num_stages=NUM_STAGES,
    )


def num_programs(num_items: int, device: torch.device) -> int:
    """How many programs share up to so many items: as many as run at once, if there is work."""
    return min(num_items, PROGRAMS_PER_PROCESSOR * num_processors(device))


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
    """Each program takes every n-th item of the work list, where an item is a part and a KV head.

    The length of the list is read from the device, so a captured launch serves any list.
    """
    in_group = tl.arange(0, HEAD_TILE)
    is_head = in_group < GROUP
    key_column = tl.arange(0, KEY_TILE)
    value_column = tl.arange(0, VALUE_TILE)
    is_key_column = key_column[None, :] < KEY_SIZE
    is_value_column = value_column[None, :] < VALUE_SIZE
    num_heads = num_kv_heads * GROUP
    for item in range(tl.program_id(0), tl.load(work) * num_kv_heads, tl.num_programs(0)):
        part = work + (1 + item // num_kv_heads) * _FIELDS
        sequence = tl.load(part).to(tl.int64)
        first_token = tl.load(part + 1)
        last_token = tl.load(part + 2)
        place = tl.load(part + 3).to(tl.int64)
        first_place = tl.load(part + 4).to(tl.int64)
        num_parts = tl.load(part + 5)
        kv_head = item % num_kv_heads
        head = kv_head * GROUP + in_group

        rows = query + sequence * query_row_stride + head[:, None] * query_head_stride
        queries = tl.load(
            rows + key_column[None, :], mask=is_head[:, None] & is_key_column, other=0.0
        ).to(key_cache.dtype.element_ty)
        highest = tl.full((HEAD_TILE,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((HEAD_TILE,), dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
            highest = tl.where(place == first_place, sink, highest)
            weight = tl.where(place == first_place, 1.0, weight)
        total = tl.zeros((HEAD_TILE, VALUE_TILE), dtype=tl.float32)
        table = block_tables + sequence * table_stride
        block = block_ids(table, first_token + tl.arange(0, TOKEN_TILE), last_token, BLOCK_SIZE)
        for tile in range(first_token, last_token, TOKEN_TILE):
            token = tile + tl.arange(0, TOKEN_TILE)
            is_seen = token < last_token
            cached = (block * num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
            block = block_ids(table, token + TOKEN_TILE, last_token, BLOCK_SIZE)
            key = tl.load(
                key_cache + cached[:, None] * KEY_SIZE + key_column[None, :],
                mask=is_seen[:, None] & is_key_column,
                other=0.0,
            )
            value = tl.load(
                value_cache + cached[:, None] * VALUE_SIZE + value_column[None, :],
                mask=is_seen[:, None] & is_value_column,
                other=0.0,
            )
            scores = scores_of(queries, key, scale, softcap, HAS_SOFTCAP)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            highest, weight, total = attend_tile(scores, value, highest, weight, total)

        # The sums are empty in padding rows.
        weight_or_one = tl.where(weight == 0.0, 1.0, weight)
        total = total / weight_or_one[:, None]
        written = is_head[:, None] & is_value_column
        if num_parts == 1:
            row = (sequence * num_heads + head) * VALUE_SIZE
            tl.store(output + row[:, None] + value_column[None, :], total, mask=written)
        else:
            row = place * num_heads + head
            column = row[:, None] * VALUE_SIZE + value_column[None, :]
            tl.store(sums + column, total, mask=written)
            tl.store(log_weights + row, highest + tl.log2(weight_or_one), mask=is_head)
            # All threads have written before one of them counts the part as finished.
            tl.debug_barrier()
            counter = num_finished + sequence * num_kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
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
    """Write the output of one sequence and KV head from its parts, PARTS at once, in their order.

    Another processor may have written the parts, so they are read past the first cache (`.cg`).
    """
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
    for first in tl.range(0, num_parts, PARTS, num_stages=_NUM_STAGES):  # so that it reads ahead
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
