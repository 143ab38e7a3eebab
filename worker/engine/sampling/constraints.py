"""Bans and biases tokens, as (row, token) pairs, so that no other logits are touched."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.device.async_copies import to_device

BANNED = float("-inf")


class Constraints:
    """The constraints of one set of sequences: end tokens before `min_tokens`, bad words and
    `logit_bias`."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._banned: _Pairs | None = None
        self._bias: tuple[_Pairs, torch.Tensor] | None = None
        self._early_ends = _EarlyEnds(sequences, vocab_size)
        self._bad_endings = _BadEndings(sequences, vocab_size)
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
        return bool(self._banned or self._bias or self._early_ends or self._bad_endings)

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [R, vocab_size] in place. Rows are in the order of the sequences."""
        if self._banned is not None:
            logits[self._banned] = BANNED
        for banned in (self._early_ends.pairs(), self._bad_endings.pairs()):
            if len(banned):
                logits[_pairs(banned, self._device)] = BANNED
        if self._bias is not None:
            pairs, values = self._bias
            logits[pairs] += values


class _EarlyEnds:
    """Bans end tokens of sequences that have fewer than `min_tokens` tokens."""

    def __init__(self, sequences: list[Sequence], vocab_size: int) -> None:
        self._pending = [
            (row, sequence, [end for end in sequence.request.end_token_ids if end < vocab_size])
            for row, sequence in enumerate(sequences)
            if sequence.num_output_tokens < sequence.request.params.min_tokens
        ]

    def __bool__(self) -> bool:
        return bool(self._pending)

    def pairs(self) -> npt.NDArray[np.int64]:
        if self._pending:
            self._pending = [
                item
                for item in self._pending
                if item[1].num_output_tokens < item[1].request.params.min_tokens
            ]
        pairs = [(row, end) for row, _, ends in self._pending for end in ends]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


class _BadEndings:
    """Bans the last token of a bad word when the output ends with its other tokens."""

    def __init__(self, sequences: list[Sequence], vocab_size: int) -> None:
        # Keyed by the last token but one, so that a step examines few words.
        self._words: list[tuple[int, Sequence, dict[int, list[tuple[int, ...]]]]] = []
        for row, sequence in enumerate(sequences):
            words = defaultdict(list)
            for bad in sequence.request.bad_token_sequences:
                if len(bad) > 1 and bad[-1] < vocab_size:
                    words[bad[-2]].append(bad)
            if words:
                self._words.append((row, sequence, words))

    def __bool__(self) -> bool:
        return bool(self._words)

    def pairs(self) -> npt.NDArray[np.int64]:
        pairs = [
            (row, bad[-1])
            for row, sequence, words in self._words
            for bad in words.get(sequence.token_ids[-1], ())
            if _output_ends_with(sequence, bad[:-1])
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _output_ends_with(sequence: Sequence, tokens: tuple[int, ...]) -> bool:
    count = len(tokens)
    return sequence.num_output_tokens >= count and (*sequence.token_ids[-count:],) == tokens


_Pairs = tuple[torch.Tensor, torch.Tensor]


def _pairs(pairs: npt.NDArray[np.int64], device: torch.device) -> _Pairs:
    rows, tokens = to_device(pairs.T.copy(), device)
    return rows, tokens
