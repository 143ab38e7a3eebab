"""Log-probabilities of the chosen tokens, from the logits before any sampling parameter applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from promptq.shared.protocol.events import TokenLogprob, TopLogprob
from promptq.worker.engine.api.messages import LEAST
from promptq.worker.engine.device.async_copies import to_device
from promptq.worker.engine.device.scratch import Scratch
from promptq.worker.engine.sampling.draw import totals


class ChosenLogprobs(NamedTuple):
    """For L rows: the log-probabilities of the chosen token and of the N likeliest tokens."""

    logprob: torch.Tensor  # [L]
    rank: torch.Tensor  # [L], from 1
    top_ids: torch.Tensor  # [L, N], in descending order
    top_logprobs: torch.Tensor  # [L, N]


def report(
    logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, num_top: int, scratch: Scratch
) -> ChosenLogprobs:
    """Returns log-probabilities for the `rows` of `logits` [R, vocab_size]. `chosen` [R] are the
    tokens of all rows. `num_top` is the number N of likeliest tokens."""
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
    """The rows that report log-probabilities, and for each row the number of likeliest tokens to
    report."""

    rows: list[int]
    num_top: list[int]

    def by_row(self, token_ids: list[int], columns: Sequence[list[Any]]) -> dict[int, TokenLogprob]:
        """Maps rows to the log-probabilities of their chosen and likeliest tokens. `columns` are
        the fields of ChosenLogprobs. LEAST replaces -inf and NaN, which JSON cannot represent."""
        result = {}
        for row, num_top, logprob, rank, ids, logprobs in zip(
            self.rows, self.num_top, *columns, strict=True
        ):
            top = [
                TopLogprob(token_id=token_id, logprob=max(LEAST, each))  # this order: also of NaN
                for token_id, each in zip(ids[:num_top], logprobs[:num_top], strict=True)
            ]
            result[row] = TokenLogprob(
                token_id=token_ids[row], logprob=max(LEAST, logprob), rank=rank, top=top or None
            )
        return result
