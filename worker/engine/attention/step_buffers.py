"""Buffers with fixed addresses, from which replayed CUDA graphs read the inputs of steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from promptq.worker.engine.attention.decode_work import DecodeWork, cut
from promptq.worker.engine.attention.packed_step import Lists, PackedStep
from promptq.worker.engine.attention.prefill_work import PrefillWork
from promptq.worker.engine.attention.types import DECODE_WORK, PREFILL_WORK, StepLayout
from promptq.worker.engine.core.block_manager import num_blocks_for


@dataclass(frozen=True, slots=True, order=True)
class StepKind:
    """A kind of steps. One CUDA graph runs all steps of a kind, padded to `num_rows` rows.

    Mixed steps have chunks of prompts, with or without decodes. Other steps have only decodes, and
    launch one kernel fewer in each layer.
    """

    num_rows: int
    is_mixed: bool = False


class StepBuffers:
    """Buffers for one step, which has any of the `kinds` and up to `max_num_seqs` sequences."""

    def __init__(
        self,
        kinds: list[StepKind],
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        num_draws: int = 0,
    ) -> None:
        """`num_draws` is the size D of `PackedStep.draws` [D, S]."""
        most_rows = max(kinds).num_rows

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._input_ids = zeros(most_rows)
        self._positions = zeros(most_rows)
        self._write_blocks = zeros(most_rows) - 1  # -1: not written
        self._write_offsets = zeros(most_rows)
        self._block_tables = zeros(max_num_seqs, num_blocks_for(max_model_len, block_size))
        self._sampled = zeros(most_rows)
        self._draws = zeros(num_draws, most_rows).double()
        self._entries = {kind: zeros(5, self.max_sequences(kind)) for kind in kinds}
        contexts = [max_model_len] * min(max_num_seqs, most_rows)
        self._decodes = DecodeWork([*contexts, *[0] * (most_rows - len(contexts))], device)
        self._chunks = {
            kind: PrefillWork(self._layout(kind), (kind.num_rows, self.max_sequences(kind)))
            for kind in kinds
            if kind.is_mixed
        }

    def max_sequences(self, kind: StepKind) -> int:
        """Returns how many sequences a step of this kind may have. The step may sample from as many
        rows."""
        return min(kind.num_rows, self.max_num_seqs)

    def fits(self, layout: StepLayout, num_sampled: int, kind: StepKind) -> bool:
        """Whether a step with this layout and number of sampled rows can be padded to this kind."""
        is_mixed = layout.num_decodes < len(layout.context_lens)
        return (
            is_mixed == kind.is_mixed
            and layout.query_starts[-1] <= kind.num_rows
            and max(num_sampled, len(layout.context_lens)) <= self.max_sequences(kind)
        )

    def lists(self, layout: StepLayout, kind: StepKind) -> Lists:
        """Returns the work lists of a step that is padded to this kind. The caller puts the lists
        into the step's `layout.lists`, where `fill` reads them."""
        contexts = self._contexts(layout, kind)
        lists: Lists = {(kind, spans): cut(contexts, spans) for spans in self._decodes.requested}
        if kind.is_mixed:
            chunks = self._chunks[kind]
            lists |= {(kind, size): chunks.cut(layout, size) for size in chunks.requested}
        return lists

    @staticmethod
    def _contexts(layout: StepLayout, kind: StepKind) -> list[int]:
        """Returns the context length of each row: -1 for a row of a chunk, 0 for padding."""
        decodes, num_rows = layout.context_lens[: layout.num_decodes], layout.query_starts[-1]
        of_chunks = [-1] * (num_rows - len(decodes))
        return [*decodes, *of_chunks, *[0] * (kind.num_rows - num_rows)]

    def fill(
        self,
        step: PackedStep,
        sampled: torch.Tensor,
        kind: StepKind,
        entries: torch.Tensor | None = None,
    ) -> None:
        """Copy a step's inputs and its `sampled` rows into the buffers, padded to `kind`. `entries`
        becomes `PackedStep.entries`."""
        layout = step.layout
        for buffer, values, nothing in (
            (self._input_ids, step.input_ids[0], 0),
            (self._positions, step.positions[0], 0),
            (self._write_blocks, layout.write_blocks, -1),
            (self._write_offsets, layout.write_offsets, 0),
            (self._sampled, sampled, 0),
        ):
            buffer[: len(values)] = values
            buffer[len(values) : kind.num_rows] = nothing
        num_draws, num_drawn = step.draws.shape
        self._draws[:num_draws, :num_drawn] = step.draws
        self._draws[:, num_drawn : kind.num_rows] = 0.0
        if entries is not None:
            padded, num_entries = self._entries[kind].zero_(), entries.shape[1]
            padded[:, :num_entries] = entries
            padded[2, num_entries:] = layout.query_starts[-1]
        num_sequences, width = layout.block_tables.shape
        self._block_tables[:num_sequences, :width] = layout.block_tables
        lists: dict[Hashable, torch.Tensor] = {
            key[1]: each
            for key, each in layout.lists.items()
            if isinstance(key, tuple) and key[0] == kind
        }
        self._decodes.fill(self._contexts(layout, kind), lists)
        if kind.is_mixed:
            self._chunks[kind].fill(layout, lists)

    def step(self, kind: StepKind) -> PackedStep:
        """Returns a step whose tensors are the buffers. Until `fill` is called, all rows are
        padding."""
        self._decodes.fill([0] * kind.num_rows)
        layout = self._layout(kind)
        layout.plans[DECODE_WORK] = self._decodes
        if kind.is_mixed:
            layout.plans[PREFILL_WORK] = self._chunks[kind]
        rows, sampled = slice(kind.num_rows), slice(self.max_sequences(kind))
        return PackedStep(
            items=[],
            input_ids=self._input_ids[None, rows],
            positions=self._positions[None, rows],
            layout=layout,
            sampled=self._sampled[sampled],
            draws=self._draws[:, sampled],
            unknown=self._sampled.new_empty(2, 0),
            entries=self._entries[kind],
        )

    def _layout(self, kind: StepKind) -> StepLayout:
        """Returns a layout in which each row is a decode. All contexts have the greatest length, an
        upper bound."""
        rows, longest = kind.num_rows, self._block_tables.shape[1] * self._block_size
        return StepLayout(
            num_decodes=rows,
            query_starts=list(range(rows + 1)),
            context_lens=[longest] * rows,
            block_tables=self._block_tables[: self.max_sequences(kind)],
            write_blocks=self._write_blocks[:rows],
            write_offsets=self._write_offsets[:rows],
            block_size=self._block_size,
        )
