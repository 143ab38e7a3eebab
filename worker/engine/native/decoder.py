"""Builds the native decoder from a model of the library whose layers are of the Llama kind.

A layer's modules tell what it computes. The check at load compares the result with the library's
own model. So a family that has the same module names but another formula is detected, and is
served through its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.backend import LayerCache, Pattern
from promptq.worker.engine.attention.packed_step import PackedStep

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of weights that it can compute with."""

VISIBLE = {"full": 0, "sliding": 1, "chunked": 2}
"""The kinds of patterns as native/src/attention/pieces.h numbers them."""

_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class NotOfThisKindError(Exception):
    """The model is not of the kind that the native decoder computes; the message says where."""


class NativeDecoder:
    """Computes packed steps like PackedModel, in one call that releases the interpreter lock.

    Raises NotOfThisKindError if the model has a part that it does not know.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        caches: Sequence[LayerCache],
        patterns: Sequence[Pattern],
        max_length: int,
    ) -> None:
        whole: Any = model  # its class is only partly typed
        body = whole.get_decoder()
        layers = list(body.layers)
        attention = layers[0].self_attn
        _require(len(layers) == len(caches), "layers without attention")
        _require({"embed_tokens", "layers", "norm", "rotary_emb"} == _parts(body), "other parts")
        norms = list(_norms(body))
        epsilons = {getattr(norm, "variance_epsilon", 0.0) for norm in norms}
        _require(len(epsilons) == 1 and 0.0 not in epsilons, "norms that are not all RMS norms")
        head = whole.get_output_embeddings()
        _require(type(head) is nn.Linear and head.bias is None, "an output layer with a bias")
        cosine, sine = _rotations(body.rotary_emb, max_length)
        head_size = attention.head_dim
        self._decoder: Any = torch.classes.promptq.Decoder(
            body.embed_tokens.weight,
            cosine,
            sine,
            body.norm.weight,
            head.weight,
            attention.q_proj.out_features // head_size,
            attention.k_proj.out_features // head_size,
            head_size,
            epsilons.pop(),
            float(attention.scaling),
        )
        for layer, cache, pattern in zip(layers, caches, patterns, strict=True):
            self._add(layer, cache, pattern)

    def logits(self, step: PackedStep, rows: torch.Tensor) -> torch.Tensor:
        """See PackedModel."""
        layout = step.layout
        logits: torch.Tensor = self._decoder.logits(
            step.input_ids[0],
            step.positions[0],
            rows,
            torch.tensor(layout.query_starts),
            torch.tensor(layout.context_lens),
            layout.block_tables,
            layout.write_blocks,
            layout.write_offsets,
        )
        return logits

    def _add(self, layer: Any, cache: LayerCache, pattern: Pattern) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _require(_parts(layer) == _LAYER_PARTS, f"a layer of {sorted(_parts(layer))}")
        _require(_parts(attention) <= _ATTENTION_PARTS, f"attention of {_parts(attention)}")
        _require(_parts(mlp) <= _MLP_PARTS, f"an MLP of {sorted(_parts(mlp))}")
        _require(_is_silu(mlp.act_fn), "an activation other than SiLU")
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        for linear in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            _require(type(linear) is nn.Linear, f"a linear layer of type {type(linear).__name__}")
        _require(
            all(linear.bias is None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
            "an MLP with biases",
        )
        biases = [linear.bias for linear in projections if linear.bias is not None]
        _require(len(biases) in (0, 3), "biases in some of the projections")
        self._decoder.add_layer(
            layer.input_layernorm.weight,
            torch.cat([linear.weight for linear in projections]),
            torch.cat(biases) if biases else None,
            *(getattr(getattr(attention, name, None), "weight", None) for name in _HEAD_NORMS),
            attention.o_proj.weight,
            attention.o_proj.bias,
            layer.post_attention_layernorm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
            cache.key,
            cache.value,
            VISIBLE[pattern.kind],
            pattern.size,
        )


def release_weights(model: PreTrainedModel) -> None:
    """Free the weights that a native decoder of this model has copied, so that each is held once.

    The model itself cannot compute any more.
    """
    whole: Any = model
    embedding = whole.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding.weight:
            # A new parameter, because the decoder may hold the old one.
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


_HEAD_NORMS = ("q_norm", "k_norm")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotOfThisKindError(f"it has {otherwise}")


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-4.0, 4.0, 33)
    return torch.allclose(activation(probe), nn.functional.silu(probe), atol=1e-6)


def _norms(body: Any) -> Iterator[Any]:
    yield body.norm
    for layer in body.layers:
        yield from (layer.input_layernorm, layer.post_attention_layernorm)
        for name in _HEAD_NORMS:
            if (norm := getattr(layer.self_attn, name, None)) is not None:
                _require(norm.weight.shape == (layer.self_attn.head_dim,), "norms across heads")
                yield norm


def _rotations(rotary: Any, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_length, rotary size] in fp32, from the model's own module."""
    like = torch.empty(1, dtype=torch.float32)
    cosine, sine = rotary(like, torch.arange(max_length).unsqueeze(0))
    return cosine[0].contiguous(), sine[0].contiguous()
