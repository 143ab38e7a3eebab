"""Chooses a token for each row in Triton: no row is sorted, and the host waits for nothing.

The parameters are read from the device, so a launch in a CUDA graph serves any of them. A row does
only the work that its own parameters ask for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
_DIGIT = tl.constexpr(4)
_BINS = tl.constexpr(16)
_PASSES = tl.constexpr(8)
_LOWEST = tl.constexpr(-60.0)
"""A token this far below the likeliest is never drawn (see filters.py)."""


def choose_tokens(logits: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [R] from `logits` [R, vocab_size], and whether each is sound.

    `draws` [len(DRAWS), R], float64, say how (see kernels.py). A row's token does not depend on the
    other rows.
    """
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
    """One program for each row. It leaves the likeliest token where nothing is drawn."""
    row = tl.program_id(0).to(tl.int64)
    uniform = tl.load(draws + row)
    temperature = tl.load(draws + draws_stride + row).to(tl.float32)
    highest = tl.load(best + row).to(tl.float32)
    if (temperature > 0.0) & (tl.abs(highest) < float("inf")):
        min_p = tl.load(draws + 2 * draws_stride + row).to(tl.float32)
        top_k = tl.load(draws + 3 * draws_stride + row)
        top_p = tl.load(draws + 4 * draws_stride + row)
        row_logits = logits + row * logits_stride

        lowest = float("-inf")
        threshold = tl.maximum(tl.log(tl.maximum(min_p, 1e-30)), _LOWEST)
        if top_k > 0.0:
            kth = _reached(row_logits, vocab_size, highest, temperature, lowest, top_k, False, TILE)
            threshold = tl.maximum(threshold, kth)
        if top_p < 1.0:
            last = _reached(
                row_logits, vocab_size, highest, temperature, threshold, top_p, True, TILE
            )
            threshold = tl.maximum(threshold, last)

        total = tl.zeros((), dtype=tl.float64)
        for start in range(0, vocab_size, TILE):
            scaled = _scaled(row_logits, vocab_size, highest, temperature, start, TILE)
            total += tl.sum(_weights(scaled, threshold), axis=0).to(tl.float64)
        target = uniform * total

        # First the tile is found in which the sum passes the target, then the token in it.
        before = tl.zeros((), dtype=tl.float64)
        before_tile = tl.zeros((), dtype=tl.float64)
        tile = tl.zeros((), dtype=tl.int32)
        for start in range(0, vocab_size, TILE):
            scaled = _scaled(row_logits, vocab_size, highest, temperature, start, TILE)
            weight = tl.sum(_weights(scaled, threshold), axis=0).to(tl.float64)
            is_entered = (weight > 0.0) & (before <= target)
            tile = tl.where(is_entered, start, tile)
            before_tile = tl.where(is_entered, before, before_tile)
            before += weight
        scaled = _scaled(row_logits, vocab_size, highest, temperature, tile, TILE)
        weights = _weights(scaled, threshold)
        place = tl.arange(0, TILE)
        sums = before_tile + tl.cumsum(weights.to(tl.float64), axis=0)
        first = tl.min(tl.where((sums > target) & (weights > 0.0), place, TILE), axis=0)
        last_place = tl.max(tl.where(weights > 0.0, place, 0), axis=0)
        # Rounding may lift the target to the total: then it is the last one that weighs anything.
        token = tile + tl.minimum(first, last_place)
        tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _scaled(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    start: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[TILE]: logits over temperature, shifted so that the row's maximum is 0."""
    place = start + tl.arange(0, TILE)
    logit = tl.load(row_logits + place, mask=place < vocab_size, other=float("-inf"))
    return tl.minimum((logit.to(tl.float32) - highest) / temperature, 0.0)


@triton.jit
def _weights(scaled: tl.tensor, threshold: tl.tensor) -> tl.tensor:
    """[TILE]: probabilities, not normalised, of the tokens that reach the threshold."""
    return tl.where(scaled >= threshold, tl.exp(scaled), 0.0)


@triton.jit
def _reached(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    threshold: tl.tensor,
    wanted: tl.tensor,
    WEIGHS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The scaled logit with which the likeliest tokens, in descending order, reach what is wanted:
    a part of all weights if WEIGHS, otherwise a number of tokens.

    The bits of a number below zero, without the sign, grow with its distance from zero. So they are
    found digit by digit, from the highest: a pass sums the tokens for each value of a digit, and
    the sum reaches what is wanted within one of them.
    """
    bins = tl.arange(0, _BINS)
    place = tl.arange(0, TILE)
    found = tl.zeros((), dtype=tl.int32)  # the digits so far
    before = tl.zeros((), dtype=tl.float64)  # the sum of all tokens above these
    for digit in range(_PASSES):
        shift = (_PASSES - 1 - digit) * _DIGIT
        sums = tl.zeros((_BINS,), dtype=tl.float64)
        for start in range(0, vocab_size, TILE):
            scaled = _scaled(row_logits, vocab_size, highest, temperature, start, TILE)
            bits = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            if WEIGHS:
                amount = _weights(scaled, threshold)
            else:
                amount = tl.where(start + place < vocab_size, 1.0, 0.0)
            amount = tl.where((bits >> shift >> _DIGIT) == found, amount, 0.0)
            value = (bits >> shift) & (_BINS - 1)
            spread = tl.where(value[:, None] == bins[None, :], amount[:, None], 0.0)
            sums += tl.sum(spread, axis=0).to(tl.float64)
        if WEIGHS and digit == 0:
            wanted = wanted * tl.sum(sums, axis=0)
        reached = before + tl.cumsum(sums, axis=0) >= wanted
        chosen = tl.min(tl.where(reached, bins, _BINS), axis=0)
        if chosen == _BINS:  # rounding keeps the sum below: the last one that weighs anything
            chosen = tl.max(tl.where(sums > 0.0, bins, 0), axis=0)
        before += tl.sum(tl.where(bins < chosen, sums, 0.0), axis=0)
        found = (found << _DIGIT) | chosen
    return -(found.to(tl.float32, bitcast=True))
