"""Computes in a separate thread which tokens grammars allow, while the model runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.api.grammar import Grammar
from promptq.worker.engine.core.sequence import Sequence
from promptq.worker.engine.device.async_copies import to_device
from promptq.worker.engine.sampling.constraints import BANNED

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIAS_OF_BYTE = np.where(_BITS == 1, np.float32(0.0), np.float32(BANNED))
"""[256, 8]: for each value of a byte of a mask, the numbers to add to the logits of 8 tokens."""


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks for the rows of a step that have a grammar. A thread is still computing the masks."""

    rows: list[int]
    num_rows: int
    """Number of rows of the step, including rows without a grammar."""
    words: Future[tuple[torch.Tensor, dict[int, str]]]

    def apply(self, logits: torch.Tensor) -> dict[int, str]:
        """Wait for the masks, and ban disallowed tokens in `logits` [R, vocab_size] in place.
        Returns the error message of each row whose mask could not be computed."""
        masks, errors = self.words.result()
        if masks.dtype == torch.int32:
            masks = _unpack(to_device(masks.numpy(), logits.device))
        bias = masks[:, : logits.shape[1]]
        if len(self.rows) == self.num_rows:
            logits.add_(bias)
        else:
            logits.index_add_(0, to_device(self.rows, logits.device), bias)
        return {self.rows[index]: reason for index, reason in errors.items()}


class Masks:
    """Computes the token masks of grammars in a thread. All steps share the buffers, so the caller
    must apply the masks of a step before it starts the next step.

    On a CPU the thread also turns bits into numbers that are added to the logits. For a CUDA
    device, the thread leaves the bits as they are, because the numbers would take 32 times the
    memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._unpacks_here = device.type == "cpu"
        self._thread: ThreadPoolExecutor | None = None
        self._words: npt.NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
        self._bias = np.empty((0, 0, 8), dtype=np.float32)

    def start(self, sequences: list[Sequence]) -> PendingMasks | None:
        """Start computing masks for the next tokens. Returns None if no sequence has a grammar."""
        rows = [
            (row, sequence.request.grammar)
            for row, sequence in enumerate(sequences)
            if sequence.request.grammar is not None
        ]
        if not rows:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        grammars = [grammar for _, grammar in rows]
        words = self._thread.submit(self._compute, grammars)
        return PendingMasks([row for row, _ in rows], len(sequences), words)

    def _compute(self, grammars: list[Grammar]) -> tuple[torch.Tensor, dict[int, str]]:
        masker, count = grammars[0].masker, len(grammars)
        if len(self._words) < count or self._words.shape[1] != masker.num_words:
            if self._unpacks_here:
                self._bias = np.empty((count, 4 * masker.num_words, 8), dtype=np.float32)
            # Set last, because the size of `_words` stands for the size of both buffers.
            self._words = np.empty((count, masker.num_words), dtype=np.int32)
        words = self._words[:count]
        errors = masker.fill(grammars, words)
        if not self._unpacks_here:
            return torch.from_numpy(words), errors
        bias = self._bias[:count]
        np.take(_BIAS_OF_BYTE, words.view(np.uint8), axis=0, out=bias, mode="clip")
        return torch.from_numpy(bias.reshape(count, -1)), errors


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Returns [G, 32 * words], float32: the numbers to add to logits, from the bits of masks."""
    bits = (words.unsqueeze(2) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    bias = torch.zeros(bits.shape, dtype=torch.float32, device=words.device)
    return bias.masked_fill_(bits == 0, BANNED).flatten(1)
