"""Splits a library's model of the Llama kind into its parts.

The names, shapes and types of a layer's modules show what it computes. The check at load compares a
decoder's result with the library's model. So it detects a family that has the same names but
another formula. The library's modules serve such a family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.quantization.modules import QuantizedEmbedding, QuantizedLinear

_BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_EMBEDDINGS = (nn.Embedding, QuantizedEmbedding)
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class NotOfThisKindError(Exception):
    """The model is not of the kind that promptq's decoders compute; the message says where."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer: `hidden += output(attention(norm(hidden)))`, then the same with the MLP."""

    input_norm: torch.Tensor  # [hidden size]
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: torch.Tensor | None  # [head size], of each head before its rotation
    key_norm: torch.Tensor | None  # [head size]; there are both norms, or none
    output: nn.Linear
    inner_norm: torch.Tensor  # [hidden size]
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        projections = (self.query, self.key, self.value, self.output)
        return (*projections, self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class LlamaParts:
    """A whole model of this kind. Linear layers and the embedding may be quantized. Tensors are the
    model's parameters, not copies."""

    embedding: nn.Embedding
    layers: list[LlamaLayer]
    norm: torch.Tensor  # [hidden size]
    head: nn.Linear  # its weight may be that of the embedding
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    """The epsilon of all norms."""
    scale: float
    """The scale of all attention scores."""
    rotary: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel, num_attending: int | None = None) -> LlamaParts:
        """Returns the parts of a model, of which `num_attending` layers attend, if that is known.

        Raises NotOfThisKindError if the model has an unknown part.
        """
        whole: Any = model  # its class is only partly typed
        body = whole.get_decoder()
        _require(_parts(body) == _BODY_PARTS, "other parts")
        _require(type(body.embed_tokens) in _EMBEDDINGS, "an embedding of another kind")
        layers = [_layer(layer) for layer in body.layers]
        _require(num_attending in (None, len(layers)), "layers without attention")
        epsilons = {getattr(norm, "variance_epsilon", 0.0) for norm in _norms(body)}
        _require(len(epsilons) == 1 and 0.0 not in epsilons, "norms that are not all RMS norms")
        head = whole.get_output_embeddings()
        _require(_is_linear(head) and head.bias is None, "an output layer with a bias")
        shapes = {_heads(layer.self_attn) for layer in body.layers}
        _require(len(shapes) == 1, "layers with different heads")
        num_heads, num_kv_heads, head_size, scale = shapes.pop()
        return cls(
            embedding=body.embed_tokens,
            layers=layers,
            norm=body.norm.weight,
            head=head,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            epsilon=epsilons.pop(),
            scale=scale,
            rotary=body.rotary_emb,
        )

    def rotations(self, max_length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines [max_length, rotary size] from the model's module, with the
        dtype and device of `like`."""
        positions = torch.arange(max_length, device=like.device).unsqueeze(0)
        cosine, sine = self.rotary(like, positions)
        return cosine[0].contiguous(), sine[0].contiguous()


def is_of_llama_kind(model: PreTrainedModel) -> bool:
    """Whether a model has this kind's parts. The check at load shows if the formula is the same."""
    try:
        LlamaParts.of(model)
    except Exception:  # a family may have anything under these names
        return False
    return True


def _layer(layer: Any) -> LlamaLayer:
    attention, mlp = layer.self_attn, layer.mlp
    _require(_parts(layer) == _LAYER_PARTS, f"a layer of {sorted(_parts(layer))}")
    _require(_parts(attention) <= _ATTENTION_PARTS, f"attention of {sorted(_parts(attention))}")
    _require(_parts(mlp) <= _MLP_PARTS, f"an MLP of {sorted(_parts(mlp))}")
    _require(_is_silu(mlp.act_fn), "an activation other than SiLU")
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    for linear in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        _require(_is_linear(linear), f"a linear layer of type {type(linear).__name__}")
    in_mlp = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    _require(all(linear.bias is None for linear in in_mlp), "an MLP with biases")
    num_biases = sum(linear.bias is not None for linear in projections)
    _require(num_biases in (0, 3), "biases in some of the projections")
    query_norm, key_norm = (_norm_of_heads(attention, name) for name in ("q_norm", "k_norm"))
    _require((query_norm is None) == (key_norm is None), "a norm of queries or keys alone")
    return LlamaLayer(
        input_norm=layer.input_layernorm.weight,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        query_norm=query_norm,
        key_norm=key_norm,
        output=attention.o_proj,
        inner_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
    )


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, QuantizedLinear)


def _norm_of_heads(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    if norm is None:
        return None
    _require(norm.weight.shape == (attention.head_dim,), "norms across heads")
    weight: torch.Tensor = norm.weight
    return weight


def _norms(body: Any) -> Iterator[Any]:
    yield body.norm
    for layer in body.layers:
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
        for name in ("q_norm", "k_norm"):
            if (norm := getattr(layer.self_attn, name, None)) is not None:
                yield norm


def _heads(attention: Any) -> tuple[int, int, int, float]:
    """Returns the numbers of query heads and KV heads, the size of a head, and the scale."""
    size: int = attention.head_dim
    num_heads = attention.q_proj.out_features // size
    return num_heads, attention.k_proj.out_features // size, size, float(attention.scaling)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotOfThisKindError(f"it has {otherwise}")


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-4.0, 4.0, 33)
    return torch.allclose(activation(probe), nn.functional.silu(probe), atol=1e-6)
