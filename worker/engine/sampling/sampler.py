"""Chooses tokens from logits, for a whole batch at once and by the parameters of each request.

The order is: raw log-probabilities (for reports only), tokens that grammars allow, banned tokens,
logit bias, penalties, temperature, filters, one draw. Parameters that no request sets cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.device.async_copies import HostCopies, to_device
from promptq.worker.engine.device.scratch import Scratch
from promptq.worker.engine.sampling.constraints import Constraints
from promptq.worker.engine.sampling.logprobs import RawLogprobs
from promptq.worker.engine.sampling.mask_thread import PendingMasks
from promptq.worker.engine.sampling.penalties import Penalties
from promptq.worker.engine.sampling.randomness import streams, uniforms
from promptq.worker.engine.sampling.temperature_and_choice import Chosen, Distributions, kernels_on

_ROWS_AT_ONCE = 64
"""Number of prompt rows whose log-probabilities are computed at a time, to limit memory."""
_MOST_PREPARED = 8
"""The most sets of rows whose parameters are kept."""
_NO_CHOICE = (
    "no token can be chosen, because of the model's logits or of the request's limits; if the"
    " request limits nothing, a weight is not a number (fetch the model's files again), or the"
    " logits overflow in the model's dtype (try bfloat16 or float32)"
)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The chosen tokens of a step, which are on the device and are being copied to the host."""

    token_ids: torch.Tensor  # [R]
    copies: HostCopies
    """Host copies of both tensors of `Chosen`, then of the fields of ChosenLogprobs."""
    logprobs: RawLogprobs
    errors: dict[int, str] = field(default_factory=dict)
    """Maps a row to the reason why no token can be chosen for the row."""

    def tokens(self) -> list[SampledToken]:
        """Wait for the copies, and return one token for each row."""
        token_ids, is_sound, *reported = self.copies.lists()
        reports = self.logprobs.by_row(token_ids, reported)
        return [
            SampledToken(token_id, reports.get(row))
            if sound and row not in self.errors
            else SampledToken(-1, error=self.errors.get(row, _NO_CHOICE))
            for row, (token_id, sound) in enumerate(zip(token_ids, is_sound, strict=True))
        ]


class Sampler:
    """Chooses a token for each row. Keeps the prepared parameters of recent sets of rows, because
    steps with and without drafts alternate."""

    def __init__(self, vocab_size: int, device: torch.device, *, native: bool = False) -> None:
        """`native` means that the device is a CPU and native code is loaded (see `kernels_on`)."""
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels_on(device, native=native)
        self._scratch = Scratch(device)
        self._rows: dict[tuple[Sequence, ...], _Rows] = {}

    def draws(
        self, sequences: list[Sequence], num_ahead: list[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """Returns the random numbers and parameters that `sample` uses: [len(DRAWS), R]."""
        rows = self._rows_of(sequences)
        places = [len(sequence.token_ids) for sequence in sequences]
        if num_ahead is not None:
            places = [place + ahead for place, ahead in zip(places, num_ahead, strict=True)]
        positions = np.array(places, dtype=np.uint64)
        draws = rows.distributions.draws.copy()
        draws[0] = uniforms(rows.streams, positions)
        return draws

    def distributions(self, sequences: list[Sequence]) -> Distributions:
        """Returns the parameters for drawing a token for each of `sequences`."""
        return self._rows_of(sequences).distributions

    def choose(
        self, logits: torch.Tensor, sequences: list[Sequence], num_ahead: list[int]
    ) -> torch.Tensor:
        """Returns token ids [R], chosen only by temperature, filters and random numbers."""
        draws = to_device(self.draws(sequences, num_ahead), self._device)
        return self._kernels.choose(logits, self.distributions(sequences), draws)[0]

    def sample(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        masks: PendingMasks | None = None,
        num_ahead: list[int] | None = None,
        last_tokens: torch.Tensor | None = None,
        *,
        draws: torch.Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> SamplerOutput:
        """Choose a token for each row of `logits` [R, vocab_size]. Does not write to `logits`.

        Row i belongs to `sequences[i]`, at the position after its last token, plus `num_ahead[i]`.
        `masks` are for the same rows; None if no sequence has a grammar. `last_tokens` [R], on the
        device, has each row's last token. Pass this if the host does not know a last token yet.
        `draws`, if not None, is the result of the method `draws`, copied to the device. `chosen`
        are the tokens that a CUDA graph chose with these draws. The sampler uses `chosen` unless
        there are masks, or a sequence has a constraint or penalty.
        """
        rows = self._rows_of(sequences)
        raw = logits
        if rows.adjusts or masks is not None:
            logits = self._scratch.take("adjusted", *raw.shape).copy_(raw)
        errors = masks.apply(logits) if masks is not None else {}
        if rows.adjusts:
            rows.constraints.apply(logits)
            rows.penalties.apply(logits, num_ahead, last_tokens)
        if chosen is None or logits is not raw:
            if draws is None:
                draws = to_device(self.draws(sequences, num_ahead), self._device)
            chosen = self._kernels.choose(logits, rows.distributions, draws)
        token_ids, is_sound = chosen
        reported: tuple[torch.Tensor, ...] = ()
        if rows.logprobs.rows:
            most = min(max(1, *rows.logprobs.num_top), self._vocab_size)
            reported = self._kernels.report(raw, rows.logprobs.rows, token_ids, most)
        copies = HostCopies([token_ids, is_sound, *reported])
        return SamplerOutput(token_ids, copies, rows.logprobs, errors)

    def report(self, logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> HostCopies:
        """Returns the log-probabilities (the fields of ChosenLogprobs) of the rows of `logits` [R,
        vocab_size]. `chosen` [R] has each row's token."""
        num_top = min(num_top, self._vocab_size)
        pieces = []
        for start in range(0, len(logits), _ROWS_AT_ONCE):
            some, tokens = (tensor[start : start + _ROWS_AT_ONCE] for tensor in (logits, chosen))
            pieces.append(self._kernels.report(some, [*range(len(some))], tokens, num_top))
        return HostCopies([torch.cat(columns) for columns in zip(*pieces, strict=True)])

    def _rows_of(self, sequences: list[Sequence]) -> _Rows:
        key = tuple(sequences)
        if (rows := self._rows.get(key)) is None:
            if len(self._rows) == _MOST_PREPARED:
                self._rows.clear()
            rows = self._rows[key] = _Rows(sequences, self._vocab_size, self._device)
        return rows


class _Rows:
    """The prepared parameters of a set of sequences."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: torch.device) -> None:
        params = [sequence.request.params for sequence in sequences]
        reporting = [row for row, each in enumerate(params) if each.logprobs is not None]
        self.logprobs = RawLogprobs(reporting, [params[row].logprobs or 0 for row in reporting])
        self.constraints = Constraints(sequences, vocab_size, device)
        self.penalties = Penalties(sequences, device)
        self.adjusts = bool(self.constraints or self.penalties)
        seeds = np.array([sequence.request.seed for sequence in sequences], dtype=np.uint64)
        self.streams = streams(seeds)
        self.distributions = Distributions(params, vocab_size, device)
