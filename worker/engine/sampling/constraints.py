"""Bans tokens and adds `logit_bias`. Changes only the logits of the affected (row, token) pairs."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.device.async_copies import to_device

BANNED = float("-inf")


class Constraints:
    """Constraints of sequences: no end token before `min_tokens`, no bad words, `logit_bias`."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._banned: _Pairs | None = None
        self._bias: tuple[_Pairs, torch.Tensor] | None = None
        self._early = [
            (row, sequence, [end for end in sequence.request.end_token_ids if end < vocab_size])
            for row, sequence in enumerate(sequences)
            if not sequence.may_end
        ]
        """(row, sequence, end tokens) for each output that has fewer than `min_tokens` tokens."""
        self._words: list[tuple[int, Sequence, dict[int, list[tuple[int, ...]]]]] = []
        """(row, sequence, bad words) for each row with bad words of several tokens. The key of a
        word is its second to last token, so that a step compares only a few words."""
        for row, sequence in enumerate(sequences):
            words = defaultdict(list)
            for bad in sequence.request.bad_token_sequences:
                if len(bad) > 1 and bad[-1] < vocab_size:
                    words[bad[-2]].append(bad)
            if words:
                self._words.append((row, sequence, words))
        banned = [
            (row, bad[0])
            for row, sequence in enumerate(sequences)
            for bad in sequence.request.bad_token_sequences
            if len(bad) == 1 and bad[0] < vocab_size
        ]
        if banned:
            self._banned = _pairs(np.array(banned), device)
        bias = {
            (row, int(token_id)): value
            for row, sequence in enumerate(sequences)
            for token_id, value in (sequence.request.params.logit_bias or {}).items()
            if int(token_id) < vocab_size
        }
        if bias:
            values = to_device(np.array([*bias.values()], dtype=np.float32), device)
            self._bias = _pairs(np.array([*bias]), device), values

    def __bool__(self) -> bool:
        return bool(self._banned or self._bias or self._early or self._words)

    def apply(self, logits: torch.Tensor) -> None:
        """Apply the constraints to `logits` [R, vocab_size] in place. Row i is for sequence i."""
        if self._banned is not None:
            logits[self._banned] = BANNED
        if banned := [*self._early_ends(), *self._bad_endings()]:
            logits[_pairs(np.array(banned), self._device)] = BANNED
        if self._bias is not None:
            pairs, values = self._bias
            logits[pairs] += values

    def _early_ends(self) -> list[tuple[int, int]]:
        """Returns (row, end token) for each row whose output has fewer than `min_tokens` tokens."""
        self._early = [each for each in self._early if not each[1].may_end]
        return [(row, end) for row, _, ends in self._early for end in ends]

    def _bad_endings(self) -> list[tuple[int, int]]:
        """Returns (row, last token of a bad word) where the word's other tokens end the output."""
        return [
            (row, bad[-1])
            for row, sequence, words in self._words
            for bad in words.get(sequence.token_ids[-1], ())
            if _output_ends_with(sequence, bad[:-1])
        ]


def _output_ends_with(sequence: Sequence, tokens: tuple[int, ...]) -> bool:
    count = len(tokens)
    return sequence.num_output_tokens >= count and (*sequence.token_ids[-count:],) == tokens


_Pairs = tuple[torch.Tensor, torch.Tensor]


def _pairs(pairs: npt.NDArray[np.int64], device: torch.device) -> _Pairs:
    rows, tokens = to_device(pairs.T.copy(), device)
    return rows, tokens
