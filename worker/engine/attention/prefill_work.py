"""The tiles that the chunks of a step are cut into: some successive queries of one chunk each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.attention.backend import StepLayout
from promptq.worker.engine.device.async_copies import to_device

FIELDS = 4
"""The numbers that describe a tile (see `cut`)."""


def cut(layout: StepLayout, queries_per_tile: int) -> npt.NDArray[np.int32]:
    """[num_tiles, FIELDS]: sequence, first row, number of rows, position of the first.

    The tiles that see the most come first, so that no long tile starts at the end.
    """
    tiles = []
    for sequence in range(layout.num_decodes, len(layout.context_lens)):
        first_row, end = layout.query_starts[sequence], layout.query_starts[sequence + 1]
        first_position = layout.context_lens[sequence] - (end - first_row)
        for row in range(first_row, end, queries_per_tile):
            num_rows = min(queries_per_tile, end - row)
            tiles.append((sequence, row, num_rows, first_position + row - first_row))
    tiles.sort(key=lambda tile: tile[3], reverse=True)
    return np.array(tiles, dtype=np.int32).reshape(-1, FIELDS)


class PrefillWork:
    """The tiles of a step, in one list for each size of tile that layers ask for.

    With `room`, for so many rows of so many chunks, `fill` may replace the step by another one.
    The lists then stay where they are, as graphs that are replayed need it, and end with tiles
    without rows.
    """

    def __init__(self, layout: StepLayout, room: tuple[int, int] | None = None) -> None:
        self._layout = layout
        self._room = room
        self._lists: dict[int, torch.Tensor] = {}
        starts = layout.query_starts[layout.num_decodes :]
        self.longest_chunk = room[0] if room else max(end - row for row, end in pairwise(starts))
        """The most rows of a chunk."""

    def fill(self, layout: StepLayout) -> None:
        """Go on with the chunks of another step."""
        self._layout = layout
        for queries_per_tile, tiles in self._lists.items():
            tiles.copy_(self._tiles(queries_per_tile))

    def tiles(self, queries_per_tile: int) -> torch.Tensor:
        """The list (see `cut`) of tiles of this size, on the device."""
        if queries_per_tile not in self._lists:
            self._lists[queries_per_tile] = self._tiles(queries_per_tile)
        return self._lists[queries_per_tile]

    def _tiles(self, queries_per_tile: int) -> torch.Tensor:
        tiles = cut(self._layout, queries_per_tile)
        if self._room is not None:
            num_rows, num_chunks = self._room
            listed = np.zeros((num_rows // queries_per_tile + num_chunks, FIELDS), dtype=np.int32)
            listed[: len(tiles)] = tiles
            tiles = listed
        return to_device(tiles, self._layout.block_tables.device)
