"""Functions that the Triton kernels share: scores, visible positions, and sizes of tiles.

Without a GPU, kernels run in Triton's interpreter if TRITON_INTERPRET=1 is set before the import.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime import driver

if TYPE_CHECKING:
    from promptq.worker.engine.attention.types import LayerCache, Pattern

LOG2_E = tl.constexpr(1.4426950408889634)
SLIDING = tl.constexpr(1)
CHUNKED = tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

PATTERN_CODES = {"full": 0, "sliding": SLIDING.value, "chunked": CHUNKED.value}

MAX_KEYS_PER_TILE = 64
MAX_LATENT_HEADS = 16
"""The most heads of latent attention that a program computes, because the sums are large."""
_A_CARD = {"max_shared_mem": 227 * 1024, "multiprocessor_count": 2}
"""GPU properties in the interpreter. With few processors, a program gets several parts."""


@triton.jit
def block_ids(
    table: tl.tensor, token: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Returns the block ids of the positions `token`, or 0 from `end` on. `table` is the sequence's
    block table. Kernels load the ids one tile ahead, so that loads of K and V do not wait."""
    return tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0)


@triton.jit
def rows_of(
    cache: tl.tensor, place: tl.tensor, column: tl.tensor, mask: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Returns the rows `place` of K or V [rows, SIZE], and zeros outside of `mask`."""
    return tl.load(cache + place[:, None] * SIZE + column[None, :], mask=mask, other=0.0)


@triton.jit
def queries_of(
    rows: tl.tensor,
    is_row: tl.tensor,
    key_column: tl.tensor,
    value_column: tl.tensor,
    cache: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    IS_LATENT: tl.constexpr,
) -> tl.tuple:
    """Loads queries from the pointers `rows` [rows, 1]. Returns the columns that multiply K. In
    latent attention, also returns the columns that multiply V. If the cache has more than 8 bits,
    the columns get its dtype."""
    mask = is_row[:, None] & (key_column < KEY_SIZE)[None, :]
    FIRST: tl.constexpr = VALUE_SIZE if IS_LATENT else 0
    queries = tl.load(rows + FIRST + key_column[None, :], mask=mask, other=0.0)
    for_values = queries
    if IS_LATENT:
        mask = is_row[:, None] & (value_column < VALUE_SIZE)[None, :]
        for_values = tl.load(rows + value_column[None, :], mask=mask, other=0.0)
    if cache.dtype.element_ty.primitive_bitwidth > 8:
        dtype = cache.dtype.element_ty
        queries, for_values = queries.to(dtype), for_values.to(dtype)
    return queries, for_values


@triton.jit
def first_visible(position: tl.tensor, pattern_size: tl.tensor, PATTERN: tl.constexpr) -> tl.tensor:
    """Returns the result of Pattern.first_visible, computed on the device."""
    first = position * 0
    if PATTERN == SLIDING:
        first = tl.maximum(position + 1 - pattern_size, 0)
    if PATTERN == CHUNKED:
        first = position - position % pattern_size
    return first


@triton.jit
def dot(left: tl.tensor, right: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Returns `total + left @ right` in fp32. Operands in fp32 are not rounded to TF32."""
    if INTERPRETED:  # the interpreter multiplies bf16 as if the bits were integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def widened(tile: tl.tensor, queries: tl.tensor) -> tl.tensor:
    """Returns a tile of K or V, with 8-bit numbers converted to the dtype of the queries."""
    if tile.dtype.primitive_bitwidth == 8:
        tile = tile.to(queries.dtype)
    return tile


@triton.jit
def in_fp8(numbers: tl.tensor) -> tl.tensor:
    """Returns the numbers rounded to FP8 (e4m3). Numbers beyond 448 become 448."""
    numbers = numbers.to(tl.float32)
    if INTERPRETED:  # the interpreter loses the carry when it rounds up
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        numbers = tl.clamp(bits.to(tl.float32, bitcast=True), -448.0, 448.0)
    return numbers.to(tl.float8e4nv)


@triton.jit
def as_kept(tile: tl.tensor, cache: tl.tensor) -> tl.tensor:
    """Returns a tile of K or V as `cache` keeps it: rounded to FP8 if the cache has 8 bits."""
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        tile = in_fp8(tile)
    return tile


@triton.jit
def scores_of(
    query: tl.tensor,
    key: tl.tensor,
    for_values: tl.tensor,
    value: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    IS_LATENT: tl.constexpr,
) -> tl.tensor:
    """Returns [queries, keys]: attention scores times log2(e), for a softmax with exp2. In latent
    attention, a key is `value` and then `key`, and a query is `for_values` and then `query`."""
    scores = tl.zeros((query.shape[0], key.shape[0]), dtype=tl.float32)
    if IS_LATENT:
        scores = dot(for_values, tl.trans(widened(value, query)), scores)
    scores = dot(query, tl.trans(widened(key, query)), scores) * scale
    if HAS_SOFTCAP:  # tanh(x) is 2 sigmoid(2 x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores * LOG2_E


@triton.jit
def attend_tile(
    scores: tl.tensor, value: tl.tensor, highest: tl.tensor, weight: tl.tensor, total: tl.tensor
) -> tl.tuple:
    """Adds one tile of keys to a softmax that is computed tile by tile.

    `scores` [queries, keys] are -inf for keys that a query does not see. `value` is [keys, size].
    `highest`, `weight` and `total` are each query's highest score, sum of weights, and weighted sum
    of values so far. Returns these three, updated (Milakov and Gimelshein, "Online normalizer
    calculation for softmax").
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # For a query that has seen no key yet, -inf - -inf would be NaN.
    origin = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - origin[:, None])
    fading = tl.exp2(highest - origin)
    weight = weight * fading + tl.sum(weights, 1)
    total = dot(weights.to(value.dtype), value, total * fading[:, None])
    return new_highest, weight, total


def padded(size: int) -> int:
    """Returns `size` rounded up to a power of two, at least 16, as matrix products require."""
    return max(16, 1 << (size - 1).bit_length())


def head_groups(num_heads: int, query_size: int, cache: LayerCache) -> tuple[int, bool]:
    """Returns how many query heads a program computes together, and whether the cache has latents.

    A latent is K and V of one token in compressed form. All query heads read the latents as one KV
    head. The cache has latents if `query_size` is larger than the rows of `cache.key`.
    """
    _, num_kv_heads, _, key_size = cache.key.shape
    is_latent = query_size > key_size
    group = num_heads // num_kv_heads
    if is_latent:
        group = max(size for size in range(1, MAX_LATENT_HEADS + 1) if num_heads % size == 0)
    return group, is_latent


def pattern_arguments(pattern: Pattern) -> dict[str, int]:
    """Returns the kernel arguments that describe a pattern."""
    return {"pattern_size": max(1, pattern.size), "PATTERN": PATTERN_CODES[pattern.kind]}


def keys_per_tile(cache: LayerCache, shared_memory: int, num_tiles: int, most: int) -> int:
    """Returns the number of keys per tile: `most`, halved until `num_tiles` tiles fit into
    `shared_memory`, but at least 16. In fp32, the number is at most MAX_KEYS_PER_TILE / 2."""
    itemsize = max(2, cache.key.element_size())  # 8 bits are widened
    bytes_per_key = (padded(cache.key.shape[-1]) + padded(cache.value.shape[-1])) * itemsize
    # fp32 products do not use the matrix units, and larger tiles would spill registers.
    tile = most if itemsize < 4 else min(most, MAX_KEYS_PER_TILE // 2)
    while tile > 16 and tile * bytes_per_key * num_tiles > shared_memory:
        tile //= 2
    return tile


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Returns the most bytes of shared memory that one program may use."""
    return _properties(device)["max_shared_mem"]


@cache
def num_processors(device: torch.device) -> int:
    return _properties(device)["multiprocessor_count"]


@cache
def architecture(device: torch.device) -> int:
    """Returns the compute capability times ten, such as 90. `device` must be the current device."""
    return 90 if INTERPRETED.value else int(driver.active.get_current_target().arch)


def _properties(device: torch.device) -> dict[str, int]:
    if INTERPRETED.value:
        return _A_CARD
    properties: dict[str, int] = driver.active.utils.get_device_properties(device.index or 0)
    return properties
