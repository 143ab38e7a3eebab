"""Writes a step's K and V into the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from promptq.worker.engine.attention.triton_kernels.common import as_kept

if TYPE_CHECKING:
    from promptq.worker.engine.attention.types import LayerCache, StepLayout


def write_cache(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout
) -> None:
    """Write `key` [T, num_kv_heads, key_size] and `value` [T, num_kv_heads, value_size]. Rows whose
    write block is -1 only pad the step, and are not written."""
    num_rows, num_kv_heads, key_size = key.shape
    _write_kernel[(num_rows, num_kv_heads)](
        key,
        value,
        cache.key,
        cache.value,
        layout.write_blocks,
        layout.write_offsets,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        num_kv_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value.shape[2],
        BLOCK_SIZE=layout.block_size,
        KEY_TILE=triton.next_power_of_2(key_size),
        VALUE_TILE=triton.next_power_of_2(value.shape[2]),
        num_warps=1,
    )


@triton.jit
def _write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    write_blocks: tl.tensor,
    write_offsets: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.load(write_blocks + row)
    if block >= 0:
        place = (block * num_kv_heads + head) * BLOCK_SIZE + tl.load(write_offsets + row)

        column = tl.arange(0, KEY_TILE)
        within = column < KEY_SIZE
        source = key + row * key_row_stride + head * key_head_stride
        read = tl.load(source + column, mask=within)
        tl.store(key_cache + place * KEY_SIZE + column, as_kept(read, key_cache), mask=within)

        column = tl.arange(0, VALUE_TILE)
        within = column < VALUE_SIZE
        source = value + row * value_row_stride + head * value_head_stride
        read = tl.load(source + column, mask=within)
        tl.store(value_cache + place * VALUE_SIZE + column, as_kept(read, value_cache), mask=within)
