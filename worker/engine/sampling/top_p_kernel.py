"""The threshold of top_p in Triton: no row is sorted, and the host waits for nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
_DIGIT = tl.constexpr(4)
_BINS = tl.constexpr(16)
_PASSES = tl.constexpr(8)


def top_p_thresholds(
    scaled: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor, lowest: float
) -> torch.Tensor:
    """[R, 1]: the largest logit of `scaled` [R, vocab_size] that is needed to reach `top_p` [R, 1]
    of the weights that pass `threshold` [R, 1]; all as in `filters.thresholds`.

    The maximum of a row is 0. Tokens more than `-lowest` below it have no weight.
    """
    result = torch.empty_like(threshold)
    _top_p_kernel[(len(scaled),)](
        scaled,
        threshold.contiguous(),
        top_p.contiguous(),
        result,
        scaled.shape[1],
        lowest,
        TILE=TILE,
        num_warps=8,
    )
    return result


@triton.jit
def _top_p_kernel(
    scaled: tl.tensor,
    threshold: tl.tensor,
    top_p: tl.tensor,
    result: tl.tensor,
    vocab_size: tl.tensor,
    lowest: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program for each row. The bits of a number below zero, without the sign, grow with its
    distance from zero. So they are found digit by digit, from the highest: a pass sums the weights
    for each value of a digit, and the sum reaches what is wanted within one of them.
    """
    row = tl.program_id(0).to(tl.int64)
    logits = scaled + row * vocab_size
    passing = tl.load(threshold + row)
    floor = tl.maximum(passing, lowest)
    wanted_part = tl.load(top_p + row)

    bins = tl.arange(0, _BINS)
    place = tl.arange(0, TILE)
    found = tl.zeros((), dtype=tl.int32)  # the digits so far
    before = tl.zeros((), dtype=tl.float64)  # what all tokens above these weigh
    wanted = tl.zeros((), dtype=tl.float64)
    for digit in range(_PASSES):
        shift = (_PASSES - 1 - digit) * _DIGIT
        sums = tl.zeros((_BINS,), dtype=tl.float64)
        for start in range(0, vocab_size, TILE):
            logit = tl.load(logits + start + place, mask=start + place < vocab_size, other=-1e30)
            bits = tl.minimum(logit, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            counts = (logit >= floor) & ((bits >> shift >> _DIGIT) == found)
            weight = tl.where(counts, tl.exp(logit - floor), 0.0)
            value = (bits >> shift) & (_BINS - 1)
            spread = tl.where(value[:, None] == bins[None, :], weight[:, None], 0.0)
            sums += tl.sum(spread, axis=0).to(tl.float64)
        if digit == 0:
            wanted = wanted_part * tl.sum(sums, axis=0)
        reached = before + tl.cumsum(sums, axis=0) >= wanted
        chosen = tl.min(tl.where(reached, bins, _BINS), axis=0)
        if chosen == _BINS:  # rounding keeps the sum below: the last one that weighs anything
            chosen = tl.max(tl.where(sums > 0.0, bins, 0), axis=0)
        before += tl.sum(tl.where(bins < chosen, sums, 0.0), axis=0)
        found = (found << _DIGIT) | chosen
    needed = -(found.to(tl.float32, bitcast=True))
    tl.store(result + row, tl.where(wanted_part < 1.0, tl.maximum(needed, passing), passing))
