"""Finds out how a transformers model rotates heads by their positions (RoPE)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError, require


@dataclass(frozen=True, slots=True)
class RotationTables:
    """Cosines and sines [positions, pairs] for rotary embeddings."""

    cosine: torch.Tensor
    sine: torch.Tensor
    is_interleaved: bool
    """Whether a pair is two neighbours in a head: 0 and 1, not 0 and size / 2."""

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns the rotated `heads` [positions, 2 * pairs]."""
        if self.is_interleaved:
            first, second = heads[..., ::2], heads[..., 1::2]
        else:
            first, second = heads.chunk(2, dim=-1)
        cosine, sine = self.cosine, self.sine
        both = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.stack(both, -1).flatten(-2) if self.is_interleaved else torch.cat(both, -1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How some layers rotate heads. Tables may cover only the first numbers of a head."""

    module: nn.Module
    """The transformers module that computes cosines and sines."""
    layer_type: str | None
    """The layer type that is passed to `module`, if its tables depend on the type."""
    apply: Callable[..., Any] | None
    """The family's function that rotates queries and keys by the tables."""

    def is_of(self, attention: nn.Module, size: int) -> bool:
        """Whether an attention module with inputs of `size` numbers rotates its heads.

        Derivatives on the device `meta` show which inputs the output depends on, so no weight is
        read. Raises NotOfThisKindError if positions affect the output other than by rotation.
        """
        like = torch.empty(1, device=next(attention.parameters()).device)
        with torch.inference_mode(False), torch.enable_grad():
            try:
                tables = [_on_meta(table) for table in self._computed(2, like)]
                positions = _on_meta(torch.zeros(1, 2))
                output = _attended(attention, size, tables, positions)
            except Exception:  # the module may need anything; the check at load decides
                return True
            if not output.requires_grad:
                return False
            inputs = [*tables, positions]
            *by_tables, by_positions = torch.autograd.grad(output, inputs, allow_unused=True)
        require(by_positions is None, "attention that reads positions beside its rotation")
        return any(each is not None for each in by_tables)

    def tables(self, max_length: int, like: torch.Tensor) -> RotationTables:
        """Returns the tables for positions below `max_length`, with the dtype and device of `like`.
        Raises NotOfThisKindError if pairs are in an unknown order."""
        cosine, sine = (table[0] for table in self._computed(max_length, like))
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

    def _computed(self, max_length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the module's cosines and sines [1, max_length, ...]."""
        positions = torch.arange(max_length, device=like.device).unsqueeze(0)
        further = () if self.layer_type is None else (self.layer_type,)
        tables = self.module(like, positions, *further)
        if isinstance(tables, torch.Tensor):  # complex numbers, one for each pair
            tables = [torch.cat([each, each], -1) for each in (tables.real, tables.imag)]
        cosine, sine = tables
        return cosine, sine

    def _is_by(self, tables: RotationTables, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
        """Whether the family's function rotates a few heads in the same way as these tables."""
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
        # Some families rotate queries and keys by one call each.
        whole_each = (whole,) if "x" in signature(self.apply).parameters else (whole, whole)
        try:
            found = self.apply(*whole_each, cosine[None, few].float(), sine[None, few].float())
        except (RuntimeError, TypeError):  # of tables with another size
            return False
        found = found if len(whole_each) == 1 else found[0]
        return torch.allclose(found[0, 0], tables.rotated(heads), atol=1e-5)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, device="meta", requires_grad=True)


def _attended(
    attention: Any, size: int, tables: list[torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    module, config = copy.copy(attention), copy.copy(attention.config)
    config._attn_implementation_internal = "eager"
    modules = {
        name: nn.Linear(each.in_features, each.out_features, device="meta")
        if isinstance(each, nn.Linear)  # also a quantized one
        else each
        for name, each in module.named_children()
    }
    vars(module).update(config=config, _modules=modules)
    output = functional_call(
        module,
        {name: torch.empty(each.shape, device="meta") for name, each in module.named_parameters()},
        kwargs={
            "hidden_states": torch.empty(1, 2, size, device="meta"),
            "position_embeddings": (*tables,),
            "attention_mask": None,
            "position_ids": positions,
        },
    )
    total: torch.Tensor = output[0].sum()
    return total
