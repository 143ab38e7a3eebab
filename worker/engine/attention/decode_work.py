"""The parts that the contexts of decodes are cut into, so that a device's programs share them.

A kernel with a fixed number of programs takes one part after another from a list. How a context is
cut depends on its own length alone. So the bits of a row's result do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.device.async_copies import to_device

if TYPE_CHECKING:
    from promptq.worker.engine.attention.backend import Pattern

PART_TOKENS = 256
"""The tokens of a part. A shorter one would take longer to start than to read."""
MAX_PARTS = 64
"""The most parts of one context. Longer contexts have parts of twice the size, and so on."""
FIELDS = 6
"""The numbers that describe a part (see `cut`)."""


def cut(contexts: Sequence[int], pattern: Pattern) -> npt.NDArray[np.int32]:
    """[1 + num_parts, FIELDS]: the work list of decodes whose contexts are so long.

    The first row begins with the number of parts. Each further row is a part: its sequence, its
    first token and the one after its last, its place in the memory for results, the place of its
    sequence's first part, and the number of its sequence's parts. The parts of a sequence are in
    order there. In the list the longest parts come first. A context of 0, which pads a batch, has
    one part without tokens. A context of -1, which stands for a row of a chunk, has none.
    """
    last = np.array(contexts, dtype=np.int64)
    first = np.array([pattern.first_visible(max(0, context - 1)) for context in contexts], np.int64)
    length = last - first
    size = np.full_like(length, PART_TOKENS)
    while (too_many := size * MAX_PARTS < length).any():
        size[too_many] *= 2
    count = np.where(last < 0, 0, np.maximum(1, -(-length // size)))
    first_place = np.cumsum(count) - count
    sequence = np.repeat(np.arange(len(contexts)), count)
    place = np.arange(len(sequence))
    start = first[sequence] + (place - first_place[sequence]) * size[sequence]
    end = np.minimum(start + size[sequence], last[sequence])
    parts = [sequence, start, end, place, first_place[sequence], count[sequence]]
    work = np.zeros((1 + len(sequence), FIELDS), dtype=np.int32)
    work[0, 0] = len(sequence)
    work[1:] = np.stack(parts, axis=1)[np.argsort(start - end, kind="stable")]
    return work


def most_parts(context: int) -> int:
    """How many parts a context of up to so many tokens may have, in a layer of any pattern."""
    return min(max(1, -(-context // PART_TOKENS)), MAX_PARTS)


@dataclass(frozen=True, slots=True)
class PartResults:
    """What the parts of a layer leave for the program that combines them."""

    sums: torch.Tensor
    """[places, num_heads, value_size], float32: a part's weighted mean of the values."""
    log_weights: torch.Tensor
    """[places, num_heads], float32: the logarithm, in base 2, of the sum of its weights."""
    num_finished: torch.Tensor
    """[num_sequences, num_kv_heads], int32: how many of the parts are done. All are 0 between
    launches: the program that finishes the last part sets the number back."""


class DecodeWork:
    """The work lists of decodes, one for each pattern that layers have, and memory for results.

    There is room for `contexts`, the lengths of the sequences. `fill` may replace them by others
    that are no longer. The tensors then stay where they are, as graphs that are replayed need it.
    Lists that are on the device already are given by their patterns.
    """

    def __init__(
        self,
        contexts: Sequence[int],
        device: torch.device,
        lists: Mapping[Hashable, torch.Tensor] = {},
    ) -> None:
        self._contexts = contexts
        self._given = lists
        self._num_sequences = len(contexts)
        self.max_parts = sum(map(most_parts, contexts))
        """The most parts in a list."""
        self._device = device
        self._lists: dict[Pattern, torch.Tensor] = {}
        self._results: dict[tuple[int, int, int], PartResults] = {}

    @property
    def patterns(self) -> Sequence[Pattern]:
        """Those that were asked for."""
        return [*self._lists]

    def fill(self, contexts: Sequence[int], lists: Mapping[Hashable, torch.Tensor] = {}) -> None:
        """Go on with sequences of other lengths."""
        self._contexts, self._given = contexts, lists
        for pattern in self._lists:
            self._write(pattern)

    def parts(self, pattern: Pattern) -> torch.Tensor:
        """The list (see `cut`) for layers of this pattern. Rows after its end mean nothing."""
        if pattern in self._given and pattern not in self._lists:
            self._lists[pattern] = self._given[pattern]
        if pattern not in self._lists:
            shape = (1 + self.max_parts, FIELDS)
            self._lists[pattern] = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._write(pattern)
        return self._lists[pattern]

    def results(self, num_heads: int, num_kv_heads: int, value_size: int) -> PartResults:
        """The memory for the parts of a layer of this shape. All such layers share it."""
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

    def _write(self, pattern: Pattern) -> None:
        work = self._given.get(pattern)
        if work is None:
            work = to_device(cut(self._contexts, pattern), self._device)
        self._lists[pattern][: len(work)] = work
