"""One step's tokens as one packed row of input, and where their K and V go."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from promptq.worker.engine.attention.backend import StepLayout
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from promptq.worker.engine.device.async_copies import to_device_at_once

UNKNOWN = 0
"""The input in place of a token that the previous step is still computing."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A packed batch, in its own order: decodes, longest context first, then chunks, shortest
    first. A decode with a draft counts as a chunk."""

    items: list[ScheduledSequence]
    input_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    layout: StepLayout

    def sampling_rows(self, items: Items[ScheduledSequence]) -> list[int]:
        """The rows from which each item's tokens are sampled. These are its last rows."""
        ends = self.layout.query_starts
        end_of = {id(item): ends[index + 1] for index, item in enumerate(self.items)}
        return [
            row
            for item in items
            for row in range(end_of[id(item)] - item.num_samples, end_of[id(item)])
        ]


class Packer:
    """Packs batches. It remembers the block tables of the slots, because they seldom change."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((0, 0), dtype=np.int64)
        self._known: list[list[int]] = []

    def pack(self, batch: Batch) -> PackedStep:
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
        inputs = (
            np.array([input_ids], dtype=np.int64),
            position_of_row[None],
            tables,
            write_blocks,
            position_of_row % self._block_size,
        )
        ids, places, block_tables, blocks, offsets = to_device_at_once(inputs, self._device)
        layout = StepLayout(
            num_decodes=len(decodes),
            query_starts=[0, *np.cumsum(counts).tolist()],
            context_lens=[item.start + item.num_rows for item in items],
            block_tables=block_tables,
            write_blocks=blocks,
            write_offsets=offsets,
            block_size=self._block_size,
        )
        return PackedStep(items, ids, places, layout)

    def _block_tables(self, sequences: list[Sequence]) -> npt.NDArray[np.int64]:
        """[len(sequences), longest table]; rewrites only the rows that changed."""
        slots = [self._slot_of(sequence) for sequence in sequences]
        width = max((len(sequence.block_table) for sequence in sequences), default=0)
        self._grow(max(slots, default=-1) + 1, width)
        for slot, sequence in zip(slots, sequences, strict=True):
            if self._known[slot] != sequence.block_table:
                table = sequence.block_table.copy()
                self._tables[slot, : len(table)] = np.array(table, dtype=np.int64)
                self._known[slot] = table  # only after it was written
        return self._tables[slots, :width]

    @staticmethod
    def _slot_of(sequence: Sequence) -> int:
        if sequence.slot is None:
            raise ValueError(f"sequence {sequence.sequence_id} is in a batch without a slot")
        return sequence.slot

    def _grow(self, num_slots: int, width: int) -> None:
        rows, columns = self._tables.shape
        if num_slots > rows or width > columns:
            tables = np.zeros((max(rows, num_slots), max(columns, 2 * width)), dtype=np.int64)
            tables[:rows, :columns] = self._tables
            self._known += [[] for _ in range(num_slots - rows)]
            self._tables = tables
