"""Applies min_p, top_k and top_p as one threshold on the scaled logits of each row.

A token stays if and only if its logit reaches the threshold. So tokens with equal logits are
treated alike, and the result does not depend on the rest of the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from promptq.shared.protocol.request import NEUTRAL, SamplingParams
from promptq.worker.engine.device.async_copies import to_device
from promptq.worker.engine.sampling.draw import totals

FILTERS = ("min_p", "top_k", "top_p")
"""Fields of SamplingParams, in the order of `Filters` in native/src/sampling.cpp."""

FIRST_CANDIDATES = 256
"""Number of likeliest tokens that top_p examines first. Each further try takes 8 times as many."""

_LOWEST = -60.0
"""A token whose scaled logit is this far below the row's largest is never drawn."""
_JUST_BELOW_ONE = 1.0 - 2.0**-24


def filter_values(params: list[SamplingParams], vocab_size: int) -> list[tuple[float, int, float]]:
    """Returns each row's values in the order of FILTERS. A top_k that keeps all tokens is 0."""
    return [
        (each.min_p, each.top_k if 0 < each.top_k < vocab_size else NEUTRAL.top_k, each.top_p)
        for each in params
    ]


class Filters:
    """The filters of all rows. `min_p`, `top_k` and `top_p` are columns [R, 1], or None if no row
    uses the filter."""

    def __init__(self, params: list[SamplingParams], vocab_size: int, device: torch.device) -> None:
        rows = filter_values(params, vocab_size)
        self.table = to_device(np.array(rows, dtype=np.float64), device)
        """[R, len(FILTERS)]: the values of all filters."""

        values = [{*each} for each in zip(*rows, strict=True)]

        def column(place: int, dtype: torch.dtype) -> torch.Tensor | None:
            if values[place] == {getattr(NEUTRAL, FILTERS[place])}:
                return None
            return self.table[:, place : place + 1].to(dtype)

        self.min_p = column(0, torch.float32)
        self.top_k = column(1, torch.int64)
        self.top_p = column(2, torch.float64)
        self.max_top_k = max(values[1])


def thresholds(scaled: torch.Tensor, kept: Filters, scratch: torch.Tensor) -> torch.Tensor | None:
    """Returns the threshold of each row, [R, 1]; None if nothing is filtered.

    `scaled` [R, vocab_size] are logits divided by temperature, shifted so that each row's maximum
    is 0. The order is that of vLLM and transformers. First min_p applies, relative to the likeliest
    token. Then top_k applies to the remaining tokens. Then top_p keeps the likeliest tokens until
    their probabilities, normalised, reach `top_p`. Overwrites `scratch`, shaped like `scaled`.
    """
    min_p, top_k, top_p = kept.min_p, kept.top_k, kept.top_p
    if min_p is None and top_k is None and top_p is None:
        return None
    threshold = scaled.new_zeros(len(scaled), 1).log() if min_p is None else min_p.log()
    if top_k is None and top_p is None:
        return threshold
    candidates = max(kept.max_top_k, 0 if top_p is None else FIRST_CANDIDATES)
    likeliest = scaled.topk(min(candidates, scaled.shape[1]), dim=1).values
    if top_k is not None:
        kth = likeliest.gather(1, (top_k - 1).clamp_min(0))
        threshold = torch.maximum(threshold, kth.masked_fill(top_k == 0, float("-inf")))
    if top_p is not None:
        threshold = _top_p(scaled, likeliest, threshold, top_p, scratch)
    return threshold


def weights_above(scaled: torch.Tensor, threshold: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns `out`, filled with unnormalised probabilities [R, vocab_size]: 0 where a logit in
    `scaled` is below the row's threshold."""
    torch.sub(scaled, threshold.clamp_min(_LOWEST), out=out).exp_()
    return torch.threshold_(out, _JUST_BELOW_ONE, 0.0)


def _top_p(
    scaled: torch.Tensor,
    likeliest: torch.Tensor,
    threshold: torch.Tensor,
    top_p: torch.Tensor,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Returns [R, 1]: the lowest logit that `top_p` keeps. The likeliest tokens are kept until
    the sum of their weights reaches `top_p` times the sum of all weights above `threshold`.
    `likeliest` [R, candidates] are the largest logits, descending."""
    wanted = top_p * totals(weights_above(scaled, threshold, scratch))
    result, is_reached = _last_needed(likeliest, threshold, wanted)
    candidates, vocab_size = likeliest.shape[1], scaled.shape[1]
    pending = (~is_reached & (top_p < 1.0)).squeeze(1).nonzero().squeeze(1)
    while len(pending) and candidates < vocab_size:
        candidates = min(8 * candidates, vocab_size)
        likeliest = scaled[pending].topk(candidates, dim=1).values
        result[pending], is_reached = _last_needed(likeliest, threshold[pending], wanted[pending])
        pending = pending[~is_reached.squeeze(1)]
    # Where rounding keeps the sum below `wanted`, all tokens that pass are needed.
    return torch.where(top_p < 1.0, result, threshold)


def _last_needed(
    likeliest: torch.Tensor, threshold: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [R, 1]: the logit at which the summed weights reach `wanted`, and whether they do."""
    weights = (likeliest - threshold.clamp_min(_LOWEST)).exp().double()
    needed = (weights.cumsum(dim=1) < wanted).sum(dim=1, keepdim=True)
    is_reached = needed < likeliest.shape[1]
    last = likeliest.gather(1, needed.clamp_max(likeliest.shape[1] - 1))
    return torch.where(is_reached, torch.maximum(last, threshold), threshold), is_reached
