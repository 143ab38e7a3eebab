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
    """See `RecurrentRows.table`. Columns without rows pad the step."""
    owner: torch.Tensor
    """[T], int64: the sequence of each row; an arbitrary sequence for a padding row."""
    most_decodes: int
    """The most sequences that may have one row. These sequences come first in the table."""
    most_chunks: int
    """The most sequences that may have several rows. These sequences come last in the table."""

    @classmethod
    def of(cls, rows: RecurrentRows) -> StepSequences:
        num_chunks = rows.table.shape[1] - rows.num_decodes
        return cls(rows.table, _owners(rows.table, rows.starts[-1]), rows.num_decodes, num_chunks)

    @classmethod
    def padded(cls, table: torch.Tensor, num_rows: int, *, has_chunks: bool) -> StepSequences:
        """Returns the sequences of a padded step: decodes, and chunks only if `has_chunks`."""
        most = table.shape[1]
        return cls(table, _owners(table, num_rows), most, most if has_chunks else 0)

    def __len__(self) -> int:
        return self.table.shape[1]


def _owners(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns `StepSequences.owner`. In the table, sequences are in the order of their rows."""
    rows = torch.arange(num_rows, device=table.device)
    owners = torch.searchsorted(table[2] + table[3], rows, right=True)
    return owners.clamp_(max=table.shape[1] - 1)


@triton.jit
def sequence_at(table: tl.tensor, index: tl.tensor, num_sequences: tl.tensor) -> tl.tuple:
    """Returns five numbers for the sequence at `index`: the state's entry before the step, its
    entry after the step, the first row, the number of rows, and the number of rows without drafted
    tokens."""
    place = table + index
    count = tl.load(place + 3 * num_sequences)
    return (
        tl.load(place),
        tl.load(place + num_sequences),
        tl.load(place + 2 * num_sequences),
        count,
        count - tl.load(place + 4 * num_sequences),
    )
