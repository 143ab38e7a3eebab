"""Cuts the contexts of decodes into parts, and divides the parts among a device's programs.

The parts of a context depend on the length of this context alone. So the bits of a row's result do
not depend on the other rows. A kernel with a fixed number of programs takes spans from a list. A
span is one or more successive parts of a sequence. The length of spans depends on the batch.
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
"""The tokens of a part. A shorter part would take longer to start than to read."""
MAX_PARTS = 64
"""The most parts of one context. The size of parts is doubled until this many are enough."""
FIELDS = 7
"""The number of fields that describe a span (see `cut`)."""
START_TOKENS = 64
"""Number of tokens that a program reads in the time that starting a span takes."""
MAX_SPAN_TOKENS = 4096

_Numbers = npt.NDArray[np.int64]


def cut(contexts: Sequence[int], spans: SpanList) -> npt.NDArray[np.int32]:
    """Returns [1 + num_spans, FIELDS]: the work list of decodes with contexts of these lengths.

    The first row begins with the number of spans. Each further row is a span, with these fields:
    sequence; first token; end token (exclusive); index of the span's first part in the memory for
    results; index of the sequence's first part; number of the sequence's parts; tokens of a part
    (the last part may have fewer). The parts of a sequence have successive indices. The longest
    spans come first in the list. A context of 0, which pads a batch, has one span without tokens. A
    context of -1, which stands for a row of a chunk, has no span.
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
    """Returns the number of tokens in each sequence's spans, chosen so that the kernel's run time
    is short. Long spans need fewer starts, and programs share short spans more evenly."""
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
    """Returns how many pieces of `tokens` tokens each length has. 0 has one piece, -1 has none."""
    quotient: _Numbers = np.where(length < 0, 0, np.maximum(1, -(-length // tokens)))
    return quotient


def most_parts(context: int) -> int:
    """Returns the most parts of a context of up to `context` tokens, for layers of any pattern."""
    return min(max(1, -(-context // PART_TOKENS)), MAX_PARTS)


@dataclass(frozen=True, slots=True)
class PartResults:
    """Results of the parts of a layer, for the program that combines them."""

    sums: torch.Tensor
    """[parts, num_heads, value_size], float32: the weighted mean of a part's values."""
    log_weights: torch.Tensor
    """[parts, num_heads], float32: the logarithm, in base 2, of the sum of a part's weights."""
    num_finished: torch.Tensor
    """[num_sequences, num_kv_heads], int32: the number of parts that are done. Between launches all
    are 0, because the program that finishes the last part resets the number."""


class DecodeWork:
    """Work lists of decodes, one for each SpanList that layers request, and memory for results.

    `contexts` are the lengths of the sequences. `fill` may replace them by lengths that are not
    larger. The tensors keep their addresses, as replayed graphs need. `lists` are the work lists
    that were copied to the device with the step's inputs.
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
        """Replace the lengths of the sequences by `contexts`, and rewrite the lists."""
        self._contexts, self._copied = contexts, lists
        for key in self._lists:
            self._write(key)

    def spans(self, key: SpanList) -> torch.Tensor:
        """Returns the list (see `cut`) for `key`. Rows after the end of the list mean nothing."""
        if key in self._copied and key not in self._lists:
            self._lists[key] = self._copied[key]
        if key not in self._lists:
            shape = (1 + self.max_parts, FIELDS)
            self._lists[key] = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._write(key)
        return self._lists[key]

    def results(self, num_heads: int, num_kv_heads: int, value_size: int) -> PartResults:
        """Returns the memory for the parts of a layer. All layers of one shape share it."""
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
