"""Cuts the chunks of a step into tiles. A tile is some successive queries of one chunk."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.device.async_copies import to_device

if TYPE_CHECKING:
    from promptq.worker.engine.attention.types import StepLayout

FIELDS = 4
"""The number of fields that describe a tile (see `cut`)."""


def cut(layout: StepLayout, queries_per_tile: int) -> npt.NDArray[np.int32]:
    """Returns [num_tiles, FIELDS]: sequence, first row, number of rows, position of the first row.
    Tiles with long contexts take longest and come first, so that all programs end at about the same
    time."""
    tiles = []
    for sequence in range(layout.num_decodes, len(layout.context_lens)):
        first_row, end = layout.query_starts[sequence], layout.query_starts[sequence + 1]
        first_position = layout.context_lens[sequence] - (end - first_row)
        for row in range(first_row, end, queries_per_tile):
            num_rows = min(queries_per_tile, end - row)
            tiles.append((sequence, row, num_rows, first_position + row - first_row))
    tiles.sort(key=lambda tile: tile[3], reverse=True)
    return np.array(tiles, dtype=np.int32).reshape(-1, FIELDS)


def longest_chunk(layout: StepLayout) -> int:
    """Returns the number of rows of the longest chunk."""
    starts = layout.query_starts[layout.num_decodes :]
    return max(end - row for row, end in pairwise(starts))


class PrefillWork:
    """Work lists (see `cut`) of a step's tiles, one for each tile size that layers request.

    For CUDA graphs, pass `room`, the size (rows, chunks) of the largest step. Then the lists are
    padded with empty tiles and keep their addresses, and `fill` writes the next step into them.

    If an earlier step requested a tile size, the list for this size comes to the device together
    with the step's inputs. Such lists are in `layout.lists` or in the argument `lists` of `fill`.
    """

    def __init__(self, layout: StepLayout, room: tuple[int, int] | None = None) -> None:
        self._layout = layout
        self._room = room
        self._copied: Mapping[Hashable, torch.Tensor] = {} if room else layout.lists
        self._lists: dict[int, torch.Tensor] = {}
        self.longest_chunk = room[0] if room else longest_chunk(layout)

    @property
    def requested(self) -> Sequence[int]:
        """The sizes of tiles that layers requested."""
        return [*self._lists]

    def fill(self, layout: StepLayout, lists: Mapping[Hashable, torch.Tensor] = {}) -> None:
        """Replace the step by one with this `layout`, and rewrite all requested lists in place.
        `lists` are lists of the new step that are already on the device."""
        self._layout, self._copied = layout, lists
        for queries_per_tile, tiles in self._lists.items():
            tiles.copy_(self._tiles(queries_per_tile))

    def tiles(self, queries_per_tile: int) -> torch.Tensor:
        """Returns the list (see `cut`) of tiles of this size, on the device."""
        if queries_per_tile not in self._lists:
            self._layout.requested.tile_sizes(self.longest_chunk).add(queries_per_tile)
            self._lists[queries_per_tile] = self._tiles(queries_per_tile)
        return self._lists[queries_per_tile]

    def cut(self, layout: StepLayout, queries_per_tile: int) -> npt.NDArray[np.int32]:
        """Returns the list (see `cut`) for `layout`. If `room` was passed, the list has a fixed
        length."""
        tiles = cut(layout, queries_per_tile)
        if self._room is not None:
            num_rows, num_chunks = self._room
            listed = np.zeros((num_rows // queries_per_tile + num_chunks, FIELDS), dtype=np.int32)
            listed[: len(tiles)] = tiles
            tiles = listed
        return tiles

    def _tiles(self, queries_per_tile: int) -> torch.Tensor:
        copied = self._copied.get(queries_per_tile)
        if copied is not None:
            return copied
        tiles = self.cut(self._layout, queries_per_tile)
        return to_device(tiles, self._layout.block_tables.device)
