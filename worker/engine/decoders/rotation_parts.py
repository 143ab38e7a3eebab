"""Finds out how a library's model rotates heads by their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError


@dataclass(frozen=True, slots=True)
class RotationTables:
    """Cosines and sines [positions, pairs], by which pairs of a head's numbers are rotated."""

    cosine: torch.Tensor
    sine: torch.Tensor
    is_interleaved: bool
    """Whether the pairs are neighbours. Otherwise, the first half of the numbers are paired with
    the second, as in Llama."""

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns heads [positions, 2 * pairs], rotated."""
        if self.is_interleaved:
            first, second = heads[..., ::2], heads[..., 1::2]
        else:
            first, second = heads.chunk(2, dim=-1)
        cosine, sine = self.cosine, self.sine
        both = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.stack(both, -1).flatten(-2) if self.is_interleaved else torch.cat(both, -1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of some layers' heads: that of the first numbers, if the tables are smaller."""

    module: nn.Module
    """Computes the tables."""
    layer_type: str | None
    """The type of these layers, if the tables depend on that."""
    apply: Callable[..., Any] | None
    """The family's function that rotates queries and keys by the tables."""

    def tables(self, max_length: int, like: torch.Tensor) -> RotationTables:
        """Returns the tables for positions below `max_length`, with the dtype and device of `like`.

        Raises NotOfThisKindError if pairs are in an unknown order.
        """
        positions = torch.arange(max_length, device=like.device).unsqueeze(0)
        further = () if self.layer_type is None else (self.layer_type,)
        cosine, sine = (table[0] for table in self.module(like, positions, *further))
        half = cosine.shape[1] // 2
        layouts = [
            (slice(half), False),
            (slice(None), False),
            (slice(half), True),
            (slice(0, None, 2), True),
        ]
        for columns, is_interleaved in layouts:
            tables = RotationTables(
                cosine[:, columns].contiguous(), sine[:, columns].contiguous(), is_interleaved
            )
            if self._is_by(tables, cosine, sine):
                return tables
        raise NotOfThisKindError("it has a rotation of another kind")

    def _is_by(self, tables: RotationTables, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
        """Whether the family rotates a few heads by these tables."""
        if self.apply is None or cosine.is_meta:  # the check at load will show
            return True
        few = slice(9)
        tables = RotationTables(
            tables.cosine[few].float(), tables.sine[few].float(), tables.is_interleaved
        )
        shape = len(tables.cosine), 2 * tables.cosine.shape[1]
        heads = (
            torch.linspace(-1, 1, shape[0] * shape[1], device=cosine.device)
            .mul(7)
            .sin()
            .view(shape)
        )
        whole = heads[None, None]
        try:
            found = self.apply(whole, whole, cosine[None, few].float(), sine[None, few].float())[0]
        except (RuntimeError, TypeError):  # of tables with another size
            return False
        return torch.allclose(found[0, 0], tables.rotated(heads), atol=1e-5)
