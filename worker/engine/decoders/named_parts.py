"""Finds the parts of a transformers module by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.norm_parts import require
from promptq.worker.engine.device.precision import embedding_scale
from promptq.worker.engine.quantization.modules import QuantizedEmbedding, QuantizedLinear

_SYNONYMS = {
    "embeddings": "embed_tokens",
    "final_layernorm": "norm",
    "norm_f": "norm",
    "embedding_norm": "norm",
    "pos_emb": "rotary_emb",
    "dense": "o_proj",
    "out_proj": "o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "fc1": "up_proj",
    "fc2": "down_proj",
    "c_fc": "up_proj",
    "c_proj": "down_proj",
    "act": "act_fn",
    "activation_fn": "act_fn",
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "input_linear": "gate_up_proj",
    "output_linear": "down_proj",
    "activation": "act_fn",
}
"""Maps a family's unusual name of a part to the usual name."""


def parts_of(module: nn.Module) -> dict[str, Any]:
    """Returns child modules and parameters by name, without dropouts. A family's unusual name is
    replaced by the usual name."""
    parts: dict[str, Any] = {
        **{name: each for name, each in module.named_children() if type(each) is not nn.Dropout},
        **dict(module.named_parameters(recurse=False)),
    }
    return {_SYNONYMS.get(name, name): part for name, part in parts.items()}


def linears_of(parts: dict[str, Any], names: tuple[str, ...]) -> tuple[nn.Linear, ...]:
    """Returns the linear layers of these names. Raises NotOfThisKindError if one of them is not a
    linear layer that promptq's code supports."""
    linears = tuple(parts[name] for name in names)
    require_linears(linears)
    return linears


def require_linears(modules: Iterable[nn.Module]) -> None:
    """Raise NotOfThisKindError if a module is not a linear layer that promptq's code supports."""
    for module in modules:
        require(is_linear(module), f"a linear layer of type {type(module).__name__}")


def is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, QuantizedLinear)


def scale_of_embedding(embedding: nn.Module, dtype: torch.dtype) -> float | None:
    """Returns the factor, rounded to `dtype`, by which an embedding multiplies its rows; None if
    the embedding has no factor. Raises NotOfThisKindError for an embedding of an unknown type."""
    scale = embedding_scale(embedding)
    is_known = type(embedding) in (nn.Embedding, QuantizedEmbedding) or scale is not None
    require(is_known, f"an embedding of type {type(embedding).__name__}")
    return None if scale is None else float(torch.tensor(scale, device="cpu").to(dtype))
