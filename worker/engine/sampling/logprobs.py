"""Log-probabilities of what was chosen, before any sampling parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.schemas import TokenLogprob, TopLogprob
from worker.engine.sampling.draw import totals
from worker.engine.sampling.scratch import Scratch


@dataclass(frozen=True, slots=True)
class RawLogits:
    """The logits [L, vocab_size] of the rows that report, as the model gave them."""

    rows: list[int]
    num_top: list[int]
    logits: torch.Tensor

    @classmethod
    def of(
        cls, logits: torch.Tensor, rows: list[int], num_top: list[int], scratch: Scratch
    ) -> RawLogits:
        """A copy, as the sampler works in place."""
        copy = scratch.take("raw", len(rows), logits.shape[1])
        if len(rows) == len(logits):
            copy.copy_(logits)
        else:
            copy.copy_(logits[torch.tensor(rows, device=logits.device)])
        return cls(rows, num_top, copy)

    def report(self, chosen: torch.Tensor, scratch: Scratch) -> RawLogprobs:
        """For the token ids [R] that were chosen for the whole step."""
        index = torch.tensor(self.rows, device=chosen.device)
        chosen = chosen.index_select(0, index).unsqueeze(1)
        scores = self.logits.gather(1, chosen)
        top = self.logits.topk(min(max(1, *self.num_top), self.logits.shape[1]), dim=1)
        best = top.values[:, :1]
        weights = scratch.take("weights", *self.logits.shape)
        torch.sub(self.logits, best, out=weights).exp_()
        total = best + totals(weights).log().float()
        return RawLogprobs(
            rows=self.rows,
            num_top=self.num_top,
            logprob=(scores - total).squeeze(1),
            rank=(self.logits > scores).count_nonzero(dim=1) + 1,
            top_ids=top.indices,
            top_logprobs=top.values - total,
        )


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Still on the device."""

    rows: list[int]
    num_top: list[int]
    logprob: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def by_row(self, token_ids: list[int]) -> dict[int, TokenLogprob]:
        """What each row reports for its chosen token."""
        result = {}
        columns = (self.logprob, self.rank, self.top_ids, self.top_logprobs)
        values = zip(*(column.tolist() for column in columns), strict=True)
        for row, num_top, (logprob, rank, ids, logprobs) in zip(
            self.rows, self.num_top, values, strict=True
        ):
            top = [
                TopLogprob(token_id=token_id, logprob=each)
                for token_id, each in zip(ids[:num_top], logprobs[:num_top], strict=True)
            ]
            result[row] = TokenLogprob(
                token_id=token_ids[row], logprob=logprob, rank=rank, top=top or None
            )
        return result
