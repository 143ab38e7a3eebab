"""Log-probabilities of what was chosen, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.worker.engine.device.async_copies import to_device
from promptq.worker.engine.device.scratch import Scratch
from promptq.worker.engine.sampling.draw import totals


class ChosenLogprobs(NamedTuple):
    """Of L rows, for the token that was chosen in each, and for the N likeliest."""

    logprob: torch.Tensor  # [L]
    rank: torch.Tensor  # [L], from 1
    top_ids: torch.Tensor  # [L, N], in descending order
    top_logprobs: torch.Tensor  # [L, N]


LEAST = -9999.0
"""Stands for minus infinity, which JSON does not know (the same as in vLLM)."""


def report(
    logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int, scratch: Scratch
) -> ChosenLogprobs:
    """Of `rows` of the model's `logits` [R, vocab_size], for the token ids [R] chosen for all."""
    index = to_device(rows, logits.device)
    chosen = chosen.index_select(0, index).unsqueeze(1)
    if len(rows) < len(logits):
        logits = logits.index_select(0, index)
    raw = scratch.take("scaled", *logits.shape).copy_(logits)
    scores = raw.gather(1, chosen)
    top = raw.topk(num_top, dim=1)
    best = top.values[:, :1]
    weights = scratch.take("weights", *logits.shape)
    torch.sub(raw, best, out=weights).exp_()
    total = best + totals(weights).log().float()
    return ChosenLogprobs(
        logprob=(scores - total).squeeze(1),
        rank=(raw > scores).count_nonzero(dim=1) + 1,
        top_ids=top.indices,
        top_logprobs=top.values - total,
    )


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Which of a step's rows report, and how many of the likeliest tokens."""

    rows: list[int]
    num_top: list[int]

    def by_row(self, token_ids: list[int], columns: Sequence[list[Any]]) -> dict[int, TokenLogprob]:
        """What each row reports for its chosen token, from the columns of ChosenLogprobs."""
        result = {}
        for row, num_top, logprob, rank, ids, logprobs in zip(
            self.rows, self.num_top, *columns, strict=True
        ):
            top = [
                TopLogprob(token_id=token_id, logprob=max(each, LEAST))
                for token_id, each in zip(ids[:num_top], logprobs[:num_top], strict=True)
            ]
            result[row] = TokenLogprob(
                token_id=token_ids[row], logprob=logprob, rank=rank, top=top or None
            )
        return result
