"""From logits to tokens, for a whole batch at once and by each request's own parameters.

The order is: raw log-probabilities (reported, not used), what grammars allow, banned tokens, logit
bias, penalties, temperature, min_p, top_k, top_p, one draw. What no request asks for costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from shared.schemas import SamplingParams
from worker.engine.runner import SampledToken
from worker.engine.sampling.constraints import Constraints
from worker.engine.sampling.draw import draw
from worker.engine.sampling.filters import thresholds, weights_above
from worker.engine.sampling.logprobs import RawLogits, RawLogprobs
from worker.engine.sampling.masks import PendingMasks
from worker.engine.sampling.penalties import Penalties
from worker.engine.sampling.randomness import uniforms
from worker.engine.sampling.scratch import Scratch
from worker.engine.sequence import Sequence

_NO_CHOICE = "the model's logits, or what the request allows, leave no token to choose"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """A step's choices, still on the device."""

    token_ids: torch.Tensor  # [R]
    is_sound: torch.Tensor  # [R], bool
    logprobs: RawLogprobs | None
    errors: dict[int, str] = field(default_factory=dict)
    """Rows for which no token can be chosen, and why."""

    def tokens(self) -> list[SampledToken]:
        """Wait for the device and hand the tokens over, one for each row."""
        token_ids: list[int] = self.token_ids.tolist()
        reports = self.logprobs.by_row(token_ids) if self.logprobs is not None else {}
        return [
            SampledToken(token_id, reports.get(row))
            if sound and row not in self.errors
            else SampledToken(-1, error=self.errors.get(row, _NO_CHOICE))
            for row, (token_id, sound) in enumerate(
                zip(token_ids, self.is_sound.tolist(), strict=True)
            )
        ]


class Sampler:
    """Chooses a token for each row.

    What a set of sequences asks for is worked out when the set changes, not in every step.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._scratch = Scratch(device)
        self._sequence_ids: list[int] = []
        self._rows: _Rows | None = None

    def sample(
        self, logits: torch.Tensor, sequences: list[Sequence], masks: PendingMasks | None = None
    ) -> SamplerOutput:
        """Choose from `logits` [R, vocab_size], which may be overwritten.

        Row i is of `sequences[i]`, at the position behind its last token; `masks` are of the same
        rows, and None if none has a grammar.
        """
        rows = self._rows_of(sequences)
        raw = None
        if rows.reporting:
            raw = RawLogits.of(logits, rows.reporting, rows.num_top, self._scratch)
        if rows.adjusts or rows.samples or masks is not None:
            logits = logits.float()
        errors = masks.apply(logits) if masks is not None else {}
        if rows.adjusts:
            rows.constraints.apply(logits)
            rows.penalties.apply(logits)
        best, token_ids = logits.max(dim=1)
        is_sound = best.isfinite()
        if rows.samples:
            drawn = self._draw(logits, best, rows, sequences)
            token_ids = torch.where(rows.is_sampled, drawn, token_ids)
        report = None if raw is None else raw.report(token_ids, self._scratch)
        return SamplerOutput(token_ids, is_sound, report, errors)

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, rows: _Rows, sequences: list[Sequence]
    ) -> torch.Tensor:
        """[R]; what it draws for rows without a temperature means nothing."""
        scaled = logits.sub_(best.unsqueeze(1)).div_(rows.temperature)
        scratch = self._scratch.take("weights", *scaled.shape)
        threshold = thresholds(scaled, rows.min_p, rows.top_k, rows.top_p, rows.max_top_k, scratch)
        if threshold is None:
            weights = scaled.exp_()
        else:
            weights = weights_above(scaled, threshold, out=scaled)
        positions = np.array([sequence.num_tokens for sequence in sequences], dtype=np.uint64)
        numbers = torch.from_numpy(uniforms(rows.seeds, positions)).to(self._device)
        return draw(weights, numbers)

    def _rows_of(self, sequences: list[Sequence]) -> _Rows:
        sequence_ids = [sequence.sequence_id for sequence in sequences]
        if self._rows is None or sequence_ids != self._sequence_ids:
            self._sequence_ids = sequence_ids
            self._rows = _Rows(sequences, self._vocab_size, self._device)
        return self._rows


class _Rows:
    """What one set of sequences asks for; None, empty or False where no row asks."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: torch.device) -> None:
        params = [sequence.request.params for sequence in sequences]
        self.reporting = [row for row, each in enumerate(params) if each.logprobs is not None]
        self.num_top = [params[row].logprobs or 0 for row in self.reporting]
        self.constraints = Constraints(sequences, vocab_size, device)
        self.penalties = Penalties(sequences, device)
        self.adjusts = bool(self.constraints or self.penalties)

        # A greedy row goes through the motions with the others, which costs less than leaving it
        # out, but asks for nothing that would cost more.
        neutral = SamplingParams.model_validate({})
        params = [each if each.temperature > 0.0 else neutral for each in params]
        is_sampled = [sequence.request.params.temperature > 0.0 for sequence in sequences]
        self.samples = any(is_sampled)
        self.is_sampled = torch.tensor(is_sampled, device=device)
        self.temperature = _column([each.temperature for each in params], torch.float32, device)
        self.seeds = np.array([sequence.request.seed for sequence in sequences], dtype=np.uint64)
        top_k = [each.top_k if 0 < each.top_k < vocab_size else 0 for each in params]
        self.max_top_k = max(top_k)
        self.top_k = _column(top_k, torch.int64, device) if self.max_top_k else None
        min_p = [each.min_p for each in params]
        self.min_p = _column(min_p, torch.float32, device) if max(min_p) > 0.0 else None
        top_p = [each.top_p for each in params]
        self.top_p = _column(top_p, torch.float64, device) if min(top_p) < 1.0 else None


def _column(
    values: list[float] | list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[R, 1]"""
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
