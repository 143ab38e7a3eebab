"""The per-layer inputs that layers have in addition to the hidden states (Gemma 4).

    inputs = scale * (norm(projection_scale * projection(embedded)) + table_scale * table(ids))
    hidden += after(output(activation(gate(hidden)) * inputs[layer]))

A layer computes the second line after its MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.mlp_parts import activation_of
from promptq.worker.engine.decoders.named_parts import linears_of, scale_of_embedding
from promptq.worker.engine.decoders.norm_parts import Found, Norm, require

_TABLE, _PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
_NORM = "per_layer_projection_norm"
_GATE, _OUTPUT = "per_layer_input_gate", "per_layer_projection"
_AFTER = "post_per_layer_input_norm"
PARTS_OF_MODEL = frozenset({_TABLE, _PROJECTION, _NORM})
PARTS_OF_LAYER = frozenset({_GATE, _OUTPUT, _AFTER, "act_fn"})


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computes the additional inputs of all layers, from the token ids and their embeddings."""

    table: nn.Embedding
    """An embedding with the weight [tokens, layers * size]."""
    table_scale: float
    projection: nn.Linear
    projection_scale: float
    norm: Norm
    """The norm over one layer's inputs [size]."""
    scale: float

    @classmethod
    def of(cls, body: Any, parts: dict[str, Any], dtype: torch.dtype, found: Found) -> LayerInputs:
        """Builds the inputs from a model's `body` and its `parts` by name. `found` is a cache of
        formulas. Raises NotOfThisKindError if a part is unknown."""
        table, projection = parts[_TABLE], linears_of(parts, (_PROJECTION,))[0]
        scale = scale_of_embedding(table, dtype)
        require(projection.bias is None, "a projection for inputs of layers with a bias")
        rows = parts["embed_tokens"].num_embeddings
        require(table.num_embeddings == rows, f"inputs of layers for other than {rows} tokens")
        return cls(
            table=table,
            table_scale=1.0 if scale is None else scale,
            projection=projection,
            projection_scale=float(body.per_layer_model_projection_scale),
            norm=Norm.of(parts[_NORM], found),
            scale=float(body.per_layer_input_scale),
        )


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The part of a layer that adds the layer's additional inputs to the hidden states."""

    gate: nn.Linear
    output: nn.Linear
    activation: str
    """The activation's name in ACTIVATIONS."""
    after: Norm

    @classmethod
    def of(cls, parts: dict[str, Any], found: Found) -> LayerInput:
        """Builds this part from the layer's `parts` by name. `found` is a cache of formulas. Raises
        NotOfThisKindError if a part is unknown."""
        gate, output = linears_of(parts, (_GATE, _OUTPUT))
        has_bias = gate.bias is not None or output.bias is not None
        require(not has_bias, "a layer that reads its inputs with a bias")
        return cls(gate, output, activation_of(parts["act_fn"]), Norm.of(parts[_AFTER], found))

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return self.gate, self.output
