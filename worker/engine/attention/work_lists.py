"""Which work lists the layers of a model ask for, so that a step's lists travel with its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from promptq.worker.engine.attention import decode_work, prefill_work

if TYPE_CHECKING:
    from promptq.worker.engine.attention.backend import StepLayout
    from promptq.worker.engine.attention.decode_work import SpanList

Lists = dict[Hashable, npt.NDArray[np.int32]]


class AskedLists:
    """The lists that were asked for in earlier steps. A list that is missing here costs a copy of
    its own, once."""

    def __init__(self) -> None:
        self._spans: set[SpanList] = set()
        self._tile_sizes: defaultdict[int, set[int]] = defaultdict(set)

    def note(self, spans: SpanList) -> None:
        """Layers asked for this list of decodes."""
        self._spans.add(spans)

    def note_tiles(self, longest_chunk: int, queries_per_tile: int) -> None:
        """Layers asked for tiles of this size, beside a longest chunk of this length."""
        self._tile_sizes[_power_of_two(longest_chunk)].add(queries_per_tile)

    def lists(self, layout: StepLayout) -> Lists:
        """Those of this step, by SpanList, or by the size of tiles."""
        lists: dict[Any, npt.NDArray[np.int32]] = {}
        if decodes := layout.context_lens[: layout.num_decodes]:
            lists |= {asked: decode_work.cut(decodes, asked) for asked in self._spans}
        if len(layout.context_lens) > layout.num_decodes:
            longest = prefill_work.longest_chunk(layout)
            for size in self._tile_sizes[_power_of_two(longest)]:
                lists[size] = prefill_work.cut(layout, size)
        return lists


def _power_of_two(number: int) -> int:
    """The exponent of the next one. Tiles have a size for each (see triton_kernels/prefill.py)."""
    return (number - 1).bit_length()
