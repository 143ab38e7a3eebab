"""Cuts the contexts of decodes into parts, which the parallel programs of a kernel compute.

The parts of a context depend only on the length of this context. So the bits of a row's result do
not depend on other rows. A kernel with a fixed number of programs takes spans from a list. A span
is one or more successive parts of a sequence. The length of spans depends on the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.attention.types import SpanList
from promptq.worker.engine.device.async_copies import to_device

PART_TOKENS = 256
"""Number of tokens in a part. Starting a shorter part would take longer than reading it."""
MAX_PARTS = 64
"""The most parts of one context. If these are too few, parts have 512 tokens, 1,024 and so on."""
FIELDS = 7
"""The number of fields that describe a span (see `cut`)."""
START_TOKENS = 64
"""The time to start a span, as the number of tokens that a program could read in this time."""
MAX_SPAN_TOKENS = 4096

_Numbers = npt.NDArray[np.int64]


def cut(contexts: Sequence[int], spans: SpanList) -> npt.NDArray[np.int32]:
    """Returns [1 + num_spans, FIELDS]: the work list of decodes with these context lengths.

    The first row begins with the number of spans. Each further row is a span, with these fields:

        sequence, first token, end token (exclusive)
        index of the span's first part in PartResults, index of the sequence's first part
        number of the sequence's parts, tokens of a part (the last part may have fewer)

    The parts of a sequence have successive indices. The longest spans come first in the list. A
    context of 0, which pads a batch, has one span without tokens. A context of -1 stands for a row
    of a chunk, and has no span.
    """
    last = np.array(contexts, dtype=np.int64)
    starts = [spans.pattern.first_visible(max(0, context - 1)) for context in contexts]
    first = np.array(starts, dtype=np.int64)
    length = last - first
    size = np.full_like(length, PART_TOKENS)
    while (too_many := size * MAX_PARTS < length).any():
        size[too_many] *= 2
    count = _quotient(length, size)
    first_place = np.cumsum(count) - count
    tokens = _span_tokens(length, size, spans.at_once)
    sequence, start = _spans(length, tokens)
    end = np.minimum(start + tokens[sequence], length[sequence])
    place = first_place[sequence] + start // size[sequence]
    fields = [sequence, first[sequence] + start, first[sequence] + end, place]
    fields += [each[sequence] for each in (first_place, count, size)]
    work = np.zeros((1 + len(sequence), FIELDS), dtype=np.int32)
    work[0, 0] = len(sequence)
    work[1:] = np.stack(fields, axis=1)[np.argsort(start - end, kind="stable")]
    return work


def _span_tokens(length: _Numbers, size: _Numbers, at_once: int) -> _Numbers:
    """Returns the span length (in tokens) of each sequence. Minimises the estimated total time."""
    best, shortest = size, np.inf
    tokens = PART_TOKENS
    while tokens <= MAX_SPAN_TOKENS:
        candidate = np.maximum(size, tokens)
        sequence, start = _spans(length, candidate)
        spans = np.sort(np.minimum(candidate[sequence], length[sequence] - start))[::-1]
        of_first_program = spans[::at_once]  # no other program has more spans
        time = of_first_program.sum() + START_TOKENS * len(of_first_program)
        if time <= shortest:
            best, shortest = candidate, time
        if len(spans) <= at_once:  # all spans are computed at once
            break
        tokens *= 2
    return best


def _spans(length: _Numbers, tokens: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Returns two arrays over all spans: the span's sequence, and the index of its first token."""
    count = _quotient(length, tokens)
    sequence = np.repeat(np.arange(len(length)), count)
    index = np.arange(len(sequence)) - (np.cumsum(count) - count)[sequence]
    return sequence, index * tokens[sequence]


def _quotient(length: _Numbers, tokens: _Numbers) -> _Numbers:
    """Returns the lengths divided by `tokens`, rounded up: at least 1, but 0 for the length -1."""
    quotient: _Numbers = np.where(length < 0, 0, np.maximum(1, -(-length // tokens)))
    return quotient


def most_parts(context: int) -> int:
    """Returns an upper bound of the number of parts of a context with `context` tokens."""
    return min(max(1, -(-context // PART_TOKENS)), MAX_PARTS)


@dataclass(frozen=True, slots=True)
class PartResults:
    """Memory for one layer's results of all parts, before the parts of a context are combined."""

    sums: torch.Tensor
    """[parts, num_heads, value_size], float32: the mean of a part's values, weighted by softmax."""
    log_weights: torch.Tensor
    """[parts, num_heads], float32: the base-2 logarithm of the sum of a part's softmax weights."""
    num_finished: torch.Tensor
    """[num_sequences, num_kv_heads], int32: number of finished parts; 0 between kernel launches."""


class DecodeWork:
    """Work lists (see `cut`) of a step's decodes, one for each SpanList that layers request.

    `contexts` are the context lengths of the sequences. `fill` may replace these lengths by equal
    or smaller ones. All tensors keep their addresses, because replayed CUDA graphs read the same
    addresses. `lists` are work lists that are already on the device.
    """

    def __init__(
        self,
        contexts: Sequence[int],
        device: torch.device,
        lists: Mapping[Hashable, torch.Tensor] = {},
    ) -> None:
        self._contexts = contexts
        self._copied = lists
        self._num_sequences = len(contexts)
        self.max_parts = sum(map(most_parts, contexts))
        """The most parts of all contexts together. A list has at most this many spans."""
        self._device = device
        self._lists: dict[SpanList, torch.Tensor] = {}
        self._results: dict[tuple[int, int, int], PartResults] = {}

    @property
    def requested(self) -> Sequence[SpanList]:
        """The keys of the lists that layers requested."""
        return [*self._lists]

    def fill(self, contexts: Sequence[int], lists: Mapping[Hashable, torch.Tensor] = {}) -> None:
        """Sets new context lengths, and rewrites in place each list that a layer requested with
        `spans`. A list whose key is in `lists` is copied from there, not computed."""
        self._contexts, self._copied = contexts, lists
        for key in self._lists:
            self._write(key)

    def spans(self, key: SpanList) -> torch.Tensor:
        """Returns the list (see `cut`) for `key`. Ignore the rows after its last span."""
        if key in self._copied and key not in self._lists:
            self._lists[key] = self._copied[key]
        if key not in self._lists:
            shape = (1 + self.max_parts, FIELDS)
            self._lists[key] = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._write(key)
        return self._lists[key]

    def results(self, num_heads: int, num_kv_heads: int, value_size: int) -> PartResults:
        """Returns the memory for a layer's results. Layers of the same sizes share this memory."""
        shape = (num_heads, num_kv_heads, value_size)
        if shape not in self._results:
            places, counters = self.max_parts, (self._num_sequences, num_kv_heads)
            in_fp32: dict[str, Any] = {"dtype": torch.float32, "device": self._device}
            self._results[shape] = PartResults(
                sums=torch.empty(places, num_heads, value_size, **in_fp32),
                log_weights=torch.empty(places, num_heads, **in_fp32),
                num_finished=torch.zeros(*counters, dtype=torch.int32, device=self._device),
            )
        return self._results[shape]

    def _write(self, key: SpanList) -> None:
        work = self._copied.get(key)
        if work is None:
            work = to_device(cut(self._contexts, key), self._device)
        self._lists[key][: len(work)] = work
