"""The rows of a step for recurrent layers, and each sequence's entries in the pool of states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.nn.functional import pad

from promptq.worker.engine.device.scratch import Scratch

LONGEST_PIECE = 64
"""The most rows of a piece. Longer pieces need fewer state updates, but compare more row pairs."""
_SHORTEST_PIECE = 4


Tokens = TypeVar("Tokens", bound="tuple[torch.Tensor, ...]")


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """The rows of a step. The first `num_decodes` rows are decodes, one row for each sequence. Then
    come the chunks, the shortest chunk first. Sequence i begins at row `starts[i]`."""

    num_decodes: int
    starts: list[int]
    table: torch.Tensor
    """[5, num_sequences], int64: the pool's entry with the state before the step; the entry for the
    state after the step; the first row; the number of rows; the number of drafted rows."""
    scratch: Scratch
    _pieces: dict[int, Pieces] = field(default_factory=dict)

    @property
    def read(self) -> torch.Tensor:
        return self.table[0]

    @property
    def written(self) -> torch.Tensor:
        return self.table[1]

    @property
    def num_drafted(self) -> torch.Tensor:
        return self.table[4]

    def chunks(self) -> Iterator[tuple[int, slice]]:
        """Yields the index of each chunk's sequence, and the chunk's rows."""
        for index in range(self.num_decodes, len(self.starts) - 1):
            yield index, slice(self.starts[index], self.starts[index + 1])

    def scan(
        self,
        tokens: Tokens,
        pool: torch.Tensor,
        decode: Callable[[Tokens, torch.Tensor], torch.Tensor],
        compute_chunks: Callable[[Tokens, torch.Tensor, Pieces], torch.Tensor],
        longest_piece: int = LONGEST_PIECE,
    ) -> torch.Tensor:
        """Returns all rows' outputs. Writes the new states to `pool` [num_entries, *shape], fp32.

        `tokens` is a named tuple of tensors [T, ...]. `decode` and `compute_chunks` get the rows of
        some sequences and copies of the sequences' states. Both functions return the rows' outputs,
        and update the copies in place. `longest_piece` is the most rows of a piece.
        """
        columns, num_decodes = pool[0].numel(), self.num_decodes
        copies = self.scratch.take(f"states of {columns}", len(self.read), columns)
        torch.index_select(pool.flatten(1), 0, self.read, out=copies)
        states, kind, read = copies.view(-1, *pool.shape[1:]), type(tokens), []
        if num_decodes:
            decodes = kind(*(each[:num_decodes] for each in tokens))
            read.append(decode(decodes, states[:num_decodes]))
        if num_decodes < len(states):
            chunks, pieces = (
                kind(*(each[num_decodes:] for each in tokens)),
                self._cut(longest_piece),
            )
            read.append(compute_chunks(chunks, states[num_decodes:], pieces))
        pool.index_copy_(0, self.written, states)
        return torch.cat(read)

    def _cut(self, longest: int) -> Pieces:
        """Returns the pieces of all chunks. A piece has at most `longest` rows."""
        if longest not in self._pieces:
            lengths = [rows.stop - rows.start for _, rows in self.chunks()]
            self._pieces[longest] = Pieces(lengths, longest, self.read.device)
        return self._pieces[longest]


class Pieces:
    """The rows of all chunks, cut into pieces of equal length.

    The last piece of a chunk is padded with zeros. The first pieces of all chunks come first, then
    the second pieces, and so on. So pieces that can be computed at the same time are adjacent.
    """

    def __init__(self, lengths: list[int], longest: int, device: torch.device) -> None:
        """`lengths` are the chunks' numbers of rows, in ascending order. The size of pieces is
        chosen so that padding at most doubles the number of rows."""
        self._num_rows = sum(lengths)
        self.size = min(longest, 1 << (lengths[-1] - 1).bit_length())
        while sum(-(-length // self.size) for length in lengths) * self.size > 2 * self._num_rows:
            self.size //= 2
        self.size = max(_SHORTEST_PIECE, self.size)
        counts = [-(-length // self.size) for length in lengths]
        self.rounds: list[tuple[slice, slice]] = []
        """For each round: the range of pieces that are computed together, and the range of their
        chunks."""
        begins = [sum(lengths[:index]) for index in range(len(lengths))]
        rows: list[int] = []  # by place in the pieces; for padding, the number after the last row
        places = [0] * self._num_rows  # by row
        for number in range(counts[-1]):
            first = next(chunk for chunk, count in enumerate(counts) if count > number)
            begin = len(rows) // self.size
            self.rounds.append(
                (slice(begin, begin + len(lengths) - first), slice(first, len(lengths)))
            )
            for chunk in range(first, len(lengths)):
                start = begins[chunk] + number * self.size
                stop = min(start + self.size, begins[chunk] + lengths[chunk])
                places[start:stop] = range(len(rows), len(rows) + stop - start)
                rows += range(start, stop)
                rows += [self._num_rows] * (self.size - (stop - start))
        self._is_plain = places == [*range(self._num_rows)]
        self._num_places = len(rows)
        self._rows = torch.tensor(rows, device=device)
        self._places = torch.tensor(places, device=device)
        ones = torch.ones(self.size, self.size, dtype=torch.bool, device=device)
        self._later = ones.triu(1)  # [i, j]: whether row j of a piece comes after row i

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns [num_pieces, heads, size, ...] for the chunks' rows [rows, heads, ...]."""
        further = self._num_places - len(rows) if self._is_plain else 1
        if further:
            rows = pad(rows, (0, 0) * (rows.dim() - 1) + (0, further))
        if not self._is_plain:
            rows = rows.index_select(0, self._rows)
        return rows.view(-1, self.size, *rows.shape[1:]).transpose(1, 2)

    def decays(self, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns three tensors with products of the decays `exp(decay)` [pieces, ..., size]. The
        first has for each row i the product over the rows up to i. The second [pieces, ..., size,
        size] has for rows i and j the product over the rows j + 1 to i. This product is 0 if j
        comes after i. The third has for each row i the product over the rows after i."""
        # Differences of long sums would lose too many bits in fp32.
        sums = decay.double().cumsum(dim=-1)
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).float()
        between.masked_fill_(self._later, -torch.inf).exp_()
        return sums.float().exp(), between, (sums[..., -1:] - sums).float().exp()

    def join(self, pieces: torch.Tensor) -> torch.Tensor:
        """Returns the rows [rows, heads, ...] of pieces [num_pieces, heads, size, ...]."""
        rows = pieces.transpose(1, 2).flatten(0, 1)
        return rows[: self._num_rows] if self._is_plain else rows.index_select(0, self._places)
