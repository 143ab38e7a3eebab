"""Applies repetition, presence and frequency penalties, only to tokens that have occurred."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from promptq.shared.protocol.request import NEUTRAL
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.device.async_copies import to_device

_Occurrences = tuple[torch.Tensor, torch.Tensor]
"""For each occurrence of a token: the index in the list of sequences with penalties, and the id."""


class Penalties:
    """Penalties of the sequences in a step. Only the repetition penalty counts prompt tokens.

    Occurrences are stored as (row, token) pairs. A token that occurs twice has two pairs. For
    repetition and presence penalties, both pairs write the same value, so the token counts once.
    The frequency penalty is subtracted twice.
    """

    def __init__(self, sequences: list[Sequence], device: torch.device) -> None:
        self._device = device
        has_penalties = [sequence.request.params.has_penalties for sequence in sequences]
        self._rows = [row for row, has_any in enumerate(has_penalties) if has_any]
        self._sequences = [sequences[row] for row in self._rows]
        if self._rows:
            params = [sequence.request.params for sequence in self._sequences]
            self._repetition = self._tensor([each.repetition_penalty for each in params])
            self._presence = self._tensor([each.presence_penalty for each in params])
            self._frequency = self._tensor([each.frequency_penalty for each in params])
            self._row_of = to_device(self._rows, device)
            prompts = [
                np.unique(np.array(sequence.request.prompt_token_ids, dtype=np.int64))
                if sequence.request.params.repetition_penalty != NEUTRAL.repetition_penalty
                else np.empty(0, dtype=np.int64)
                for sequence in self._sequences
            ]
            self._prompt = self._occurrences(prompts)
            self._lengths, self._output = self._count_output()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def apply(
        self,
        logits: torch.Tensor,
        num_ahead: list[int] | None = None,
        last_tokens: torch.Tensor | None = None,
    ) -> None:
        """Apply the penalties to `logits` [R, vocab_size] in place. Row i belongs to sequence i.

        Where `num_ahead` [R] is 1, the host does not know the sequence's last token yet. Then
        `last_tokens` [R], on the device, must have each row's last token.
        """
        if not self:
            return
        self._catch_up(num_ahead or [0] * len(logits), last_tokens)
        written = []
        for index, tokens in (self._prompt, self._output):
            repetition = self._repetition[index]
            scores = logits[self._row_of[index], tokens]
            written.append(torch.where(scores > 0, scores / repetition, scores * repetition))
        for (index, tokens), scores in zip((self._prompt, self._output), written, strict=True):
            logits[self._row_of[index], tokens] = scores
        index, tokens = self._output
        rows = self._row_of[index]
        logits[rows, tokens] = logits[rows, tokens] - self._presence[index]
        logits.index_put_((rows, tokens), -self._frequency[index], accumulate=True)

    def _catch_up(self, num_ahead: list[int], last_tokens: torch.Tensor | None) -> None:
        """Add the tokens that were sampled since the last call."""
        lengths = [
            sequence.num_tokens + num_ahead[row]
            for row, sequence in zip(self._rows, self._sequences, strict=True)
        ]
        if any(now - then not in (0, 1) for now, then in zip(lengths, self._lengths, strict=True)):
            self._lengths, self._output = self._count_output()
        grown = [at for at, length in enumerate(lengths) if length > self._lengths[at]]
        if not grown:
            return
        if last_tokens is None:
            last = to_device([self._sequences[at].token_ids[-1] for at in grown], self._device)
        else:
            last = last_tokens[to_device([self._rows[at] for at in grown], self._device)]
        index, tokens = self._output
        self._output = (
            torch.cat([index, to_device(grown, self._device)]),
            torch.cat([tokens, last]),
        )
        self._lengths = lengths  # set last, in case there was no memory for the tokens

    def _count_output(self) -> tuple[list[int], _Occurrences]:
        """Returns the current lengths of the sequences, and the tokens of their outputs."""
        outputs = [
            np.array(sequence.token_ids[sequence.num_prompt_tokens :], dtype=np.int64)
            for sequence in self._sequences
        ]
        return [sequence.num_tokens for sequence in self._sequences], self._occurrences(outputs)

    def _occurrences(self, tokens: list[npt.NDArray[np.int64]]) -> _Occurrences:
        index = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
        return to_device(index, self._device), to_device(np.concatenate(tokens), self._device)

    def _tensor(self, values: list[float]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.float32), self._device)
