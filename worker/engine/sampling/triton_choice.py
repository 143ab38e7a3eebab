"""Chooses a token for each row in Triton, without sorting a row and without waiting for the device.

The kernel reads the parameters from the device, so one captured CUDA graph works for all
parameters. A row does only the work that its parameters need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)
_NUM_STAGES = tl.constexpr(3)
_LOWEST = tl.constexpr(-60.0)
"""A token whose scaled logit is this far below the largest one is never drawn (see filters.py)."""


def choose_tokens(logits: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids [R] for `logits` [R, vocab_size], and whether each row's largest logit is
    finite [R]. `draws` [len(DRAWS), R] are float64 (see temperature_and_choice.py)."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    best, token_ids = logits.max(dim=1)
    if len(logits):
        _draw_kernel[(len(logits),)](
            logits,
            best,
            draws,
            token_ids,
            logits.shape[1],
            logits.stride(0),
            draws.stride(0),
            TILE=TILE,
            num_warps=16,
        )
    return token_ids, best.isfinite()


@triton.jit(do_not_specialize=["draws_stride"])  # it is the number of rows
def _draw_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    draws: tl.tensor,
    token_ids: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    draws_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(draws + row)
    temperature = tl.load(draws + draws_stride + row).to(tl.float32)
    highest = tl.load(best + row).to(tl.float32)
    if (temperature > 0.0) & (tl.abs(highest) < float("inf")):
        min_p = tl.load(draws + 2 * draws_stride + row).to(tl.float32)
        top_k = tl.load(draws + 3 * draws_stride + row)
        top_p = tl.load(draws + 4 * draws_stride + row)
        row_logits = logits + row * logits_stride
        rate = _LOG2_E / temperature

        lowest = highest + tl.maximum(tl.log(tl.maximum(min_p, 1e-30)), _LOWEST) * temperature
        if top_k > 0.0:
            lowest = _reached(row_logits, vocab_size, highest, rate, lowest, top_k, False, TILE)
        if top_p < 1.0:
            lowest = _reached(row_logits, vocab_size, highest, rate, lowest, top_p, True, TILE)

        total = _total(row_logits, vocab_size, highest, rate, lowest, TILE)
        target = uniform * total

        # Find the tile in which the sum passes the target, then the token in it.
        before = tl.zeros((), dtype=tl.float64)
        before_tile = tl.zeros((), dtype=tl.float64)
        tile = tl.zeros((), dtype=tl.int32)
        for start in tl.range(0, vocab_size, TILE, num_stages=_NUM_STAGES):
            logit = _tile(row_logits, vocab_size, start, TILE)
            weight = tl.sum(_weights(logit, highest, rate, lowest), axis=0).to(tl.float64)
            is_entered = (weight > 0.0) & (before <= target)
            tile = tl.where(is_entered, start, tile)
            before_tile = tl.where(is_entered, before, before_tile)
            before += weight
        logit = _tile(row_logits, vocab_size, tile, TILE)
        weights = _weights(logit, highest, rate, lowest)
        place = tl.arange(0, TILE)
        sums = before_tile + tl.cumsum(weights.to(tl.float64), axis=0)
        first = tl.min(tl.where((sums > target) & (weights > 0.0), place, TILE), axis=0)
        last_place = tl.max(tl.where(weights > 0.0, place, 0), axis=0)
        # If rounding lifted the target to the total, take the last token with a weight above 0.
        token = tile + tl.minimum(first, last_place)
        tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _tile(
    row_logits: tl.tensor, vocab_size: tl.tensor, start: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Returns TILE logits of a row from index `start` on, as float32; -inf beyond the row's end."""
    place = start + tl.arange(0, TILE)
    logit = tl.load(row_logits + place, mask=place < vocab_size, other=float("-inf"))
    return logit.to(tl.float32)


@triton.jit
def _weights(logit: tl.tensor, highest: tl.tensor, rate: tl.tensor, lowest: tl.tensor) -> tl.tensor:
    """Returns [TILE]: unnormalised probabilities, 0 for logits that do not reach `lowest`."""
    return tl.where(logit >= lowest, tl.exp2((logit - highest) * rate), 0.0)


@triton.jit
def _total(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    rate: tl.tensor,
    lowest: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros((TILE,), dtype=tl.float32)
    for start in tl.range(0, vocab_size, TILE, num_stages=_NUM_STAGES):
        logit = _tile(row_logits, vocab_size, start, TILE)
        total += _weights(logit, highest, rate, lowest)
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def _reached(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    rate: tl.tensor,
    lowest: tl.tensor,
    wanted: tl.tensor,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Returns the largest logit such that all tokens with this or a larger logit reach `wanted`,
    but at least `lowest`. If WEIGHS, `wanted` is a fraction of all weights, otherwise a number of
    tokens. Each pass over the row finds two bits of the logit's key. Logits of 16 bits need fewer
    passes."""
    dtype: tl.constexpr = row_logits.dtype.element_ty
    num_passes: tl.constexpr = 8 if dtype == tl.bfloat16 else 10 if dtype == tl.float16 else 16
    if WEIGHS:
        wanted = wanted * _total(row_logits, vocab_size, highest, rate, lowest, TILE)
    found = tl.full((), -(2**31), dtype=tl.int32)
    for digit in range(num_passes):
        step = 1 << (30 - 2 * digit)
        one, two, three = found + step, found + 2 * step, found + 3 * step
        from_one = tl.zeros((TILE,), dtype=tl.float32)
        from_two = tl.zeros((TILE,), dtype=tl.float32)
        from_three = tl.zeros((TILE,), dtype=tl.float32)
        for start in tl.range(0, vocab_size, TILE, num_stages=_NUM_STAGES):
            logit = _tile(row_logits, vocab_size, start, TILE)
            key = _key(logit)
            if WEIGHS:
                amount = _weights(logit, highest, rate, lowest)
            else:
                amount = tl.where(start + tl.arange(0, TILE) < vocab_size, 1.0, 0.0)
            from_one += tl.where(key >= one, amount, 0.0)
            from_two += tl.where(key >= two, amount, 0.0)
            from_three += tl.where(key >= three, amount, 0.0)
        found = tl.where(tl.sum(from_one.to(tl.float64), axis=0) >= wanted, one, found)
        found = tl.where(tl.sum(from_two.to(tl.float64), axis=0) >= wanted, two, found)
        found = tl.where(tl.sum(from_three.to(tl.float64), axis=0) >= wanted, three, found)
    return _logit(tl.maximum(found, _key(lowest)))


@triton.jit
def _key(logit: tl.tensor) -> tl.tensor:
    """Maps float32 numbers to int32 keys that have the same order."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    """Returns the float32 number that belongs to a key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)
