"""Splits a layer's attention into the parts that promptq's decoders compute."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from promptq.worker.engine.decoders.named_parts import linears_of, parts_of
from promptq.worker.engine.decoders.norm_parts import Found, Norm, require
from promptq.worker.engine.decoders.rotation_parts import Rotation

_KEYS_ARE_VALUES = ("q_proj", "k_proj")
_SHARES_KV = ("q_proj",)
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), _KEYS_ARE_VALUES, _SHARES_KV)
_NORMS_OF_HEADS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
"""Names of query and key norms: first norms before the rotation, then norms after the rotation."""
_PARTS = {"o_proj", "sinks", "v_norm"}.union(*_PROJECTIONS, *_NORMS_OF_HEADS)


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention layer: `output(attend(place(qkv(x))))`. Here `place` applies the norms of heads,
    rotates heads, and writes K and V to the cache."""

    qkv: tuple[nn.Linear, ...]
    """Linear layers for queries, keys and values, in this order; the last two may be the same."""
    output: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_size: int
    shares_kv: bool
    """Whether the layer computes only queries, and reads an earlier layer's keys and values."""
    is_gated: bool
    """Whether the sigmoid of a gate multiplies a head's output. The gate follows the query."""
    scale: float
    """The factor of the product of query and key."""
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    query_norm: Norm | None
    key_norm: Norm | None  # there is one if the queries have one, and keys are computed
    value_norm: Norm | None
    norms_whole_rows: bool
    """Whether the norms of queries and keys normalise all heads of a row together."""
    norms_rotated: bool
    """Whether the norms of queries and keys come after the rotation."""
    rotation: Rotation | None

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (*self.qkv, self.output)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """The number of KV heads, and the number of elements in a row of K."""
        return self.num_kv_heads, self.head_size

    @classmethod
    def of(cls, attention: Any, rotary: nn.Module | None, found: Found) -> Attention:
        """Returns the parts of an attention module. `rotary` computes the model's rotations, and
        `found` is a cache of formulas. Raises NotOfThisKindError if the module has an unknown
        part."""
        parts = parts_of(attention)
        names = next((each for each in _PROJECTIONS if parts.keys() >= {*each}), ())
        is_known = names and "o_proj" in parts and parts.keys() <= _PARTS
        require(bool(is_known), f"attention of {sorted(parts)}")
        config = attention.config
        require(getattr(config, "clip_qkv", None) is None, "a clip of queries, keys and values")
        rope = getattr(config, "rope_parameters", None) or {}
        is_scaled = rope.get("llama_4_scaling_beta")
        require(not is_scaled, "queries that are scaled by their positions")
        qkv, output = linears_of(parts, names), linears_of(parts, ("o_proj",))[0]
        if names == _KEYS_ARE_VALUES:
            require(getattr(attention, "v_proj", qkv) is None, f"attention of {sorted(parts)}")
            qkv = (*qkv, qkv[1])
        shares_kv = names == _SHARES_KV
        size, group = attention.head_dim, attention.num_key_value_groups
        outputs = [linear.out_features for linear in qkv]
        is_gated = len(outputs) == 3 and outputs[0] == 2 * output.in_features
        if is_gated:
            outputs[0] //= 2
        num_heads = output.in_features // size
        num_kv_heads = num_heads // group
        sizes = [num_heads * size] + [num_kv_heads * size] * (0 if shares_kv else 2)
        is_whole = outputs in (sizes, [sum(sizes)]) and output.in_features == sizes[0]
        is_whole = is_whole and num_kv_heads * group == num_heads
        require(is_whole, "projections that are not whole heads")
        norms, norms_rotated = _norms_of_heads(parts, shares_kv, found)
        norm_sizes = [len(norm.weight) for norm in norms if norm is not None]
        norms_whole_rows = len(norm_sizes) == 2 and norm_sizes == sizes[:2] != [size, size]
        is_known = norms_whole_rows or {*norm_sizes} <= {size}
        require(is_known, f"norms of heads of size {norm_sizes}")
        require(not (norms_whole_rows and is_gated), "norms of whole rows and gates")
        value_norm = parts.get("v_norm")
        return cls(
            qkv=qkv,
            output=output,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            shares_kv=shares_kv,
            is_gated=is_gated,
            scale=float(attention.scaling) * getattr(attention, "key_multiplier", 1.0),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            sinks=parts.get("sinks"),
            query_norm=norms[0],
            key_norm=norms[1],
            value_norm=None if value_norm is None else Norm.of(value_norm, found, size),
            norms_whole_rows=norms_whole_rows,
            norms_rotated=norms_rotated,
            rotation=_rotation(attention, rotary, qkv[0].in_features),
        )


def _norms_of_heads(
    parts: dict[str, Any], shares_kv: bool, found: Found
) -> tuple[list[Norm | None], bool]:
    """Returns the norms of queries and keys, and whether they come after the rotation."""
    for names in _NORMS_OF_HEADS:
        if present := [name for name in names if name in parts]:
            wanted = list(names[:1] if shares_kv else names)
            require(present == wanted, "a norm of queries or keys alone")
            norms: list[Norm | None] = [Norm.of(parts[name], found) for name in present]
            return norms + [None] * shares_kv, names != _NORMS_OF_HEADS[0]
    return [None, None], False


def _rotation(attention: Any, rotary: Any, size: int) -> Rotation | None:
    if rotary is None:
        return None
    layer_type = None
    if "layer_type" in signature(rotary.forward).parameters:  # a table for each type of layer
        layer_type = attention.config.layer_types[attention.layer_idx]
    family = sys.modules[type(attention).__module__]
    rotation = Rotation(rotary, layer_type, getattr(family, "apply_rotary_pos_emb", None))
    return rotation if rotation.is_of(attention, size) else None
