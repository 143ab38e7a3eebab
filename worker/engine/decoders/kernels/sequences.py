"""The sequences of a step, as the kernels of recurrent layers read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from promptq.worker.engine.recurrent.rows import RecurrentRows


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The sequences of a step, for all recurrent layers. Built without waiting for the device."""

    table: torch.Tensor
    """See `RecurrentRows.table`."""
    owner: torch.Tensor
    """[T], int64: the sequence of each row."""
    num_decodes: int

    @classmethod
    def of(cls, rows: RecurrentRows) -> StepSequences:
        numbers = torch.arange(rows.table.shape[1], device=rows.table.device)
        owner = torch.repeat_interleave(numbers, rows.table[3], output_size=rows.starts[-1])
        return cls(rows.table, owner, rows.num_decodes)

    def __len__(self) -> int:
        return self.table.shape[1]


@triton.jit
def sequence_at(table: tl.tensor, index: tl.tensor, num_sequences: tl.tensor) -> tl.tuple:
    """Returns, for the sequence at `index`: the entry of the state before the step, the entry for
    the state after it, the first row, the number of rows, and how many of these are not drafted."""
    place = table + index
    count = tl.load(place + 3 * num_sequences)
    return (
        tl.load(place),
        tl.load(place + num_sequences),
        tl.load(place + 2 * num_sequences),
        count,
        count - tl.load(place + 4 * num_sequences),
    )
