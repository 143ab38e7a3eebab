"""Packs the tokens of a step into one tensor, and finds where their K and V are written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.attention import decode_work, prefill_work
from promptq.worker.engine.attention.types import RequestedLists, StepLayout
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence, slot_of
from promptq.worker.engine.device.async_copies import to_device_at_once

UNKNOWN = 0
"""Stands for an input token that the previous step is still computing."""
NO_DRAWS = np.empty((0, 0))
"""The draws [D, S] of a step without random choices."""
NOWHERE: Mapping[int, int] = MappingProxyType({})

Lists = dict[Hashable, npt.NDArray[np.int32]]
"""Work lists that are copied to the device with a step's inputs (see StepLayout.lists)."""
PaddedLists = Callable[[StepLayout, int], Lists | None]
"""A function that returns the work lists of a step, or None if the step will not be padded. Its
arguments are the step's layout, with only the lengths, and the number of sampled rows."""


def no_padding(layout: StepLayout, num_sampled: int) -> None:
    """Returns None. This is the PaddedLists function for models whose steps are never padded."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A packed batch of T rows. First come the decodes, the longest context first. Then come the
    chunks of several rows, the shortest chunk first. A decode with drafted tokens counts as a
    chunk."""

    items: list[ScheduledSequence]
    input_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    layout: StepLayout
    sampled: torch.Tensor
    """[S], int64: the rows from which tokens are sampled, in the order of `Batch.sampling`. A step
    without such rows has row 0 here, because some families cannot compute zero rows."""
    draws: torch.Tensor
    """[D, S], float64: random number and parameters for each sampled row (see `Sampler.draws`)."""
    unknown: torch.Tensor
    """[2, U], int64. First come the rows whose input tokens the previous step is still sampling.
    Then come the indices of these tokens among all tokens that the previous step samples."""
    reported: torch.Tensor | None = None
    """[2, P], int64: the rows that report log-probabilities of prompt tokens, in the order of
    `Batch.reporting`, and the prompt token after each of these rows. None if no row reports."""
    entries: torch.Tensor | None = None
    """RecurrentRows.table, with a column for each sequence that the step may have. Set only in a
    padded step of a model with recurrent layers. In a padding column, all numbers are 0 except the
    index of the first row."""

    @property
    def pooled_rows(self) -> list[int]:
        """Rows whose final hidden states are for embedding vectors, in the order of `items`."""
        ends = self.layout.query_starts[1:]
        return [
            row
            for item, end in zip(self.items, ends, strict=True)
            for row in range(end - item.num_pooled, end)
        ]


class Packer:
    """Packs batches. Remembers the block table of each slot, because block tables seldom change."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._requested = RequestedLists()
        self._tables = np.zeros((0, 0), dtype=np.int64)
        self._known: list[list[int]] = []

    def pack(
        self,
        batch: Batch,
        draws: npt.NDArray[np.float64] = NO_DRAWS,
        *,
        sampled_at: Mapping[int, int] = NOWHERE,
        padded_lists: PaddedLists = no_padding,
    ) -> PackedStep:
        """Returns the inputs of a step on the device, copied there in one transfer.

        `draws` [D, S] becomes `PackedStep.draws`. The keys of `sampled_at` are the ids of the
        sequences whose last token is not known yet. The value is the index of this token among the
        tokens that the previous step samples. `padded_lists` returns the work lists if the step
        will be padded.
        """
        decodes = [item for item in batch.scheduled if item.num_rows == 1]
        decodes.sort(key=lambda item: item.start, reverse=True)
        chunks = [item for item in batch.scheduled if item.num_rows > 1]
        chunks.sort(key=lambda item: item.num_rows)
        items = decodes + chunks

        input_ids = [token_id for item in decodes for token_id in item.token_ids or (UNKNOWN,)]
        positions = [item.start for item in decodes]
        for item in chunks:
            input_ids += item.token_ids
            positions += range(item.start, item.start + item.num_rows)

        counts = np.array([item.num_rows for item in items], dtype=np.int64)
        tables = self._block_tables([item.sequence for item in items])
        position_of_row = np.array(positions, dtype=np.int64)
        owner_of_row = np.repeat(np.arange(len(items)), counts)
        write_blocks = tables[owner_of_row, position_of_row // self._block_size]
        ends = np.cumsum(counts)
        end_of = {id(item): end for item, end in zip(items, ends.tolist(), strict=True)}
        sampled = [
            row
            for item in batch.sampling
            for row in range(end_of[id(item)] - item.num_samples, end_of[id(item)])
        ]
        layout = StepLayout(
            num_decodes=len(decodes),
            query_starts=[0, *ends.tolist()],
            context_lens=[item.start + item.num_rows for item in items],
            block_tables=self._nothing,
            write_blocks=self._nothing,
            write_offsets=self._nothing,
            block_size=self._block_size,
            requested=self._requested,
        )
        lists = padded_lists(layout, max(1, len(sampled)))
        if lists is None:
            lists = self._lists(layout)
        unknown = [
            (row, sampled_at[item.sequence.sequence_id])
            for row, item in enumerate(decodes)
            if not item.token_ids
        ]
        inputs: list[npt.NDArray[Any]] = [
            np.array([input_ids], dtype=np.int64),
            position_of_row[None],
            tables,
            write_blocks,
            position_of_row % self._block_size,
            np.array(sampled or [0], dtype=np.int64),
            draws,
            np.array(unknown, dtype=np.int64).reshape(-1, 2).T.copy(),
            *lists.values(),
        ]
        if reporting := batch.reporting:
            inputs.append(_reported(reporting, end_of))
        ids, places, block_tables, blocks, offsets, rows, numbers, continued, *copied = (
            to_device_at_once(inputs, self._device)
        )
        reported = copied.pop() if reporting else None
        layout = replace(
            layout,
            block_tables=block_tables,
            write_blocks=blocks,
            write_offsets=offsets,
            lists=dict(zip(lists, copied, strict=True)),
        )
        return PackedStep(items, ids, places, layout, rows, numbers, continued, reported)

    def _lists(self, layout: StepLayout) -> Lists:
        lists: Lists = {}
        if decodes := layout.context_lens[: layout.num_decodes]:
            lists |= {spans: decode_work.cut(decodes, spans) for spans in self._requested.spans}
        if len(layout.context_lens) > layout.num_decodes:
            for size in self._requested.tile_sizes(prefill_work.longest_chunk(layout)):
                lists[size] = prefill_work.cut(layout, size)
        return lists

    def _block_tables(self, sequences: list[Sequence]) -> npt.NDArray[np.int64]:
        slots = [slot_of(sequence) for sequence in sequences]
        width = max((len(sequence.block_table) for sequence in sequences), default=0)
        self._grow(max(slots, default=-1) + 1, width)
        for slot, sequence in zip(slots, sequences, strict=True):
            if self._known[slot] != sequence.block_table:
                table = sequence.block_table.copy()
                self._tables[slot, : len(table)] = np.array(table, dtype=np.int64)
                self._known[slot] = table  # only after the row was written
        return self._tables[slots, :width]

    def _grow(self, num_slots: int, width: int) -> None:
        rows, columns = self._tables.shape
        if num_slots > rows or width > columns:
            tables = np.zeros((max(rows, num_slots), max(columns, 2 * width)), dtype=np.int64)
            tables[:rows, :columns] = self._tables
            self._known += [[] for _ in range(num_slots - rows)]
            self._tables = tables


def _reported(
    reporting: list[ScheduledSequence], end_of: Mapping[int, int]
) -> npt.NDArray[np.int64]:
    """Returns `PackedStep.reported`. `end_of` maps `id(item)` to the end of the item's rows."""
    rows: list[int] = []
    following: list[int] = []
    for item in reporting:
        first, reported = end_of[id(item)] - item.num_rows - item.start, item.reported_rows
        rows += range(first + reported.start, first + reported.stop)
        following += item.sequence.token_ids[reported.start + 1 : reported.stop + 1]
    return np.array([rows, following], dtype=np.int64)
