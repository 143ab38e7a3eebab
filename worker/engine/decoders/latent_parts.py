"""Splits latent attention into its parts (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section
2.1).

The keys and values of all heads are products of one small vector for each token, the latent:

    query = query_up(query_norm(query_down(x)))   latent, key = split(down(x))
    scores of a head = query . (key_up(norm(latent)), key)        value = value_up(norm(latent))

`(a, b)` is one vector: `a`, then `b`. All heads share `key`. Only `key` and the last numbers of
each query are rotated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.decoders.named_parts import linears_of, parts_of
from promptq.worker.engine.decoders.norm_parts import Found, Norm, require
from promptq.worker.engine.decoders.rotation_parts import Rotation
from promptq.worker.engine.quantization.modules import QuantizedLinear

_DOWN = "kv_a_proj_with_mqa"
_KV = {_DOWN, "kv_a_layernorm", "kv_b_proj", "o_proj"}
_PARTS = (_KV | {"q_proj"}, _KV | {"q_a_proj", "q_a_layernorm", "q_b_proj"})


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """An attention layer whose keys and values come from latents."""

    inputs: tuple[nn.Linear, nn.Linear]
    """Two linear layers: one for queries, and one for the latent followed by the rotated key."""
    query_norm: Norm | None
    query_up: nn.Linear | None  # there is one if there is a `query_norm`
    norm: Norm
    up: nn.Linear
    """Computes each head's key, then its value, from the latent."""
    output: nn.Linear
    num_heads: int
    key_size: int
    """How many numbers of a head's key come from the latent."""
    rotated_size: int
    scale: float
    rotation: Rotation | None
    is_interleaved: bool
    """Whether the rotation's pairs are neighbours."""

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return *self.inputs, *(each for each in (self.query_up,) if each), self.up, self.output

    @classmethod
    def knows(cls, attention: Any) -> bool:
        """Whether the module has the parts of latent attention."""
        return parts_of(attention).keys() in _PARTS

    @classmethod
    def of(cls, attention: Any, rotary: nn.Module | None, found: Found) -> LatentAttention:
        """Returns the parts of a module for which `knows` is true. `found` is a cache of formulas.
        Raises NotOfThisKindError if a part is unknown."""
        parts = parts_of(attention)
        has_norm = "q_a_proj" in parts
        inputs = linears_of(parts, ("q_a_proj" if has_norm else "q_proj", _DOWN))
        up, output = linears_of(parts, ("kv_b_proj", "o_proj"))
        query_up = linears_of(parts, ("q_b_proj",))[0] if has_norm else None
        require(up.bias is None, "latents whose keys have a bias")
        require(not hasattr(attention, "mla_scale_q_lora"), "latents with scales")
        family = sys.modules[type(attention).__module__]
        # DeepSeek-V2's tables are complex, and V3's function puts the pairs in another order.
        is_complex = hasattr(family, "apply_rotary_emb")
        in_pairs = hasattr(family, "apply_rotary_pos_emb_interleave")
        rotation = None if rotary is None else Rotation(rotary, None, None)
        return cls(
            inputs=(inputs[0], inputs[1]),
            query_norm=Norm.of(parts["q_a_layernorm"], found) if has_norm else None,
            query_up=query_up,
            norm=Norm.of(parts["kv_a_layernorm"], found),
            up=up,
            output=output,
            num_heads=attention.num_heads,
            key_size=attention.qk_nope_head_dim,
            rotated_size=attention.qk_rope_head_dim,
            scale=float(attention.scaling),
            rotation=rotation,
            is_interleaved=is_complex or getattr(attention.config, "rope_interleave", in_pairs),
        )

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights of `up` for keys [heads, key size, rank] and for values [heads, value
        size, rank]. Both are views, unless the weight is quantized."""
        weight = self.up.weight
        if isinstance(self.up, QuantizedLinear):
            weight = self.up.quantized.dequantized().to(self.norm.weight.dtype)
        by_head = weight.view(self.num_heads, -1, weight.shape[1])
        return by_head[:, : self.key_size], by_head[:, self.key_size :]

    @property
    def cache_shape(self) -> tuple[int, int]:
        """The number of KV heads and the row size of a cache with one row for each token."""
        return 1, self.up.in_features + self.rotated_size

    def joined_spec(self, recorded: LayerSpec) -> LayerSpec:
        """Returns the spec of a cache without V. A row of K is the latent, then the rotated key."""
        num_kv_heads, key_size = self.cache_shape
        return replace(recorded, num_kv_heads=num_kv_heads, key_size=key_size, value_size=0)

    def spec(self, recorded: LayerSpec) -> LayerSpec:
        """Returns the spec of a cache with the rotated key as K, and the latent as V."""
        return replace(
            recorded,
            num_kv_heads=1,
            key_size=self.rotated_size,
            value_size=self.up.in_features,
            recorded=recorded,
        )
