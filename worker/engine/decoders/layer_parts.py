"""Describes a library's model as layers that are put together from known parts.

The names, shapes and types of modules show which parts a layer has. The formula of a norm, an
activation or a rotation shows in what the module computes from a few numbers. The check at load
compares a decoder's result with the library's model. So it detects a family that has the same
names but another formula. The library's modules serve such a family.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.decoders.expert_parts import ExpertParts
from promptq.worker.engine.decoders.mlp_parts import DenseMLP, activation_of
from promptq.worker.engine.decoders.norm_parts import (
    RMS_NORM,
    Found,
    Norm,
    NotOfThisKindError,
    require,
)
from promptq.worker.engine.decoders.rotation_parts import Rotation
from promptq.worker.engine.device.precision import embedding_scale
from promptq.worker.engine.quantization.modules import QuantizedEmbedding, QuantizedLinear
from promptq.worker.engine.recurrent.mixer import Mixer
from promptq.worker.engine.recurrent.parts import RecurrenceParts, RecurrentParts
from promptq.worker.engine.recurrent.recognition import mixer_of

_NORM_PLACES: dict[frozenset[str], tuple[str, str, str, str]] = {
    frozenset(name for name in names if name): names
    for names in (
        # Norms before what mixes positions, after it, before the MLP, and after it.
        ("input_layernorm", "", "post_attention_layernorm", ""),
        (
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
        ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        (
            *("input_layernorm", "post_self_attn_layernorm"),
            *("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        ("attention_layernorm", "", "feedforward_layernorm", ""),
        ("operator_norm", "", "ffn_norm", ""),
        ("input_layernorm", "", "pre_ff_layernorm", ""),
        ("input_layernorm", "", "", ""),  # the MLP has the input of the attention
    )
}
"""The places of a layer's norms, by the set of their names."""

_SYNONYMS = {
    "embeddings": "embed_tokens",
    "final_layernorm": "norm",
    "norm_f": "norm",
    "embedding_norm": "norm",
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
"""Some families' names of a part."""

_MIXERS = ("self_attn", "linear_attn", "mamba", "conv")
"""The names of what mixes positions. A layer with attention may have Mamba 2 beside it."""
_LONE = {"norm", "mixer"}
"""The names in a layer that has one part, of any kind, and a norm before it."""

_BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_NORMS_OF_HEADS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
"""The latter follow the rotation."""
_ATTENTION_PARTS = {"o_proj", "sinks"}.union(*_PROJECTIONS, *_NORMS_OF_HEADS)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention over the KV cache: `output(attend(place(qkv(x))))`."""

    qkv: tuple[nn.Linear, ...]
    """Their outputs, one after the other, are queries, keys and values."""
    output: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_size: int
    is_gated: bool
    """Whether what a head attends to is multiplied with the sigmoid of a gate, whose weights follow
    those of the head's query."""
    scale: float
    """The scale of scores."""
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    query_norm: Norm | None  # there are both norms, or none
    key_norm: Norm | None
    norms_whole_rows: bool
    """Whether a norm is of all heads of a row together."""
    norms_rotated: bool
    """Whether the norms follow the rotation."""
    rotation: Rotation | None

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (*self.qkv, self.output)


MLP = DenseMLP | ExpertParts
"""The kinds of MLP that a layer may have."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent layer."""

    mixer: Mixer
    """The library's module, and the shape of its states."""
    parts: RecurrentParts
    norm: Norm | None
    """The norm of a RecurrenceParts, for all values, if it has one."""

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return self.parts.linears


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: `hidden += scale * after(mixer(before(hidden)))`, then the same with the MLP.

    Any of the norms may be missing, and the mixer or the MLP.
    """

    mixer: Attention | Recurrent | None = None
    """The part that mixes positions."""
    beside: Recurrent | None = None
    """A part beside attention: it has the same input, and its result is added, too."""
    mlp: MLP | None = None
    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    is_parallel: bool = False
    """Whether the MLP has the input of the mixer."""
    mixer_scale: float = 1.0
    beside_scale: float = 1.0
    mlp_scale: float = 1.0

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent part, if there is one."""
        return self.mixer if isinstance(self.mixer, Recurrent) else self.beside

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of the large weights."""
        mixers = (part.linears for part in (self.mixer, self.beside) if part is not None)
        return (*chain(*mixers), *(() if self.mlp is None else self.mlp.modules))


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A whole model. Linear layers and the embedding may be quantized. Tensors are the model's
    parameters, not copies."""

    embedding: nn.Embedding
    embedding_scale: float
    layers: list[Layer]
    norm: Norm
    head: nn.Linear  # its weight may be that of the embedding
    logit_scale: float
    logit_softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, num_attending: int | None = None) -> ModelParts:
        """Returns the parts of a model, of which `num_attending` layers attend, if that is known.

        Raises NotOfThisKindError if the model has an unknown part.
        """
        whole: Any = model  # its class is only partly typed
        config = whole.config.get_text_config(decoder=True)
        body = whole.get_decoder()
        parts = _parts(body)
        is_known = _BODY_PARTS - {"rotary_emb"} <= parts.keys() <= _BODY_PARTS
        require(is_known, f"other parts: {sorted(parts)}")
        embedding, head = parts["embed_tokens"], whole.get_output_embeddings()
        scale = embedding_scale(embedding)
        is_known = type(embedding) in (nn.Embedding, QuantizedEmbedding) or scale is not None
        require(is_known, f"an embedding of type {type(embedding).__name__}")
        require(_is_linear(head), "an output layer of another kind")
        found: Found = {}
        layers = [layer_of(layer, parts.get("rotary_emb"), found) for layer in parts["layers"]]
        num_attentions = sum(isinstance(layer.mixer, Attention) for layer in layers)
        require(num_attending in (None, num_attentions), "layers without attention")
        dtype = parts["norm"].weight.dtype
        return cls(
            embedding=embedding,
            embedding_scale=getattr(body, "embedding_multiplier", 1.0)
            if scale is None
            else float(torch.tensor(scale, device="cpu").to(dtype)),
            layers=layers,
            norm=Norm.of(parts["norm"], found),
            head=head,
            logit_scale=getattr(whole, "logit_scale", 1.0)
            * getattr(body, "lm_head_multiplier", 1.0)
            / (getattr(config, "logits_scaling", None) or 1.0),
            logit_softcap=getattr(config, "final_logit_softcapping", None),
        )


def has_known_parts(model: PreTrainedModel) -> bool:
    """Whether all parts of a model are known. The check at load compares the formula."""
    try:
        ModelParts.of(model)
    except Exception:  # a family may have anything under these names
        return False
    return True


def layer_of(layer: Any, rotary: nn.Module | None, found: Found) -> Layer:
    """Takes a decoder layer apart. Raises NotOfThisKindError if it has an unknown part."""
    parts = _parts(layer)
    if parts.keys() == _LONE:
        return _lone_part(parts["mixer"], Norm.of(parts["norm"], found), rotary, found)
    mixing = [name for name in _MIXERS if name in parts]
    norms = frozenset(parts.keys() - {*mixing} - {"mlp", "shared_mlp"})
    mixes = len(mixing) == 1 or mixing == ["self_attn", "mamba"]
    has_mlp = not {"mlp", "shared_mlp"}.isdisjoint(parts)
    require(mixes and has_mlp and norms in _NORM_PLACES, f"a layer of {sorted(parts)}")
    places = _NORM_PLACES[norms]
    before_mixer, after_mixer, before_mlp, after_mlp = (
        Norm.of(parts[name], found) if name else None for name in places
    )
    input_scale = getattr(layer, "attention_in_multiplier", 1.0)
    mixer, beside = (
        _mixer(parts[name], rotary, found, input_scale) if name else None
        for name in (*mixing, None)[:2]
    )
    assert beside is None or isinstance(beside, Recurrent), "Mamba 2 is recurrent"
    scale = getattr(layer, "residual_multiplier", 1.0)
    return Layer(
        mixer=mixer,
        beside=beside,
        mlp=_mlp(parts.get("mlp"), parts.get("shared_mlp"), found),
        before_mixer=before_mixer,
        after_mixer=after_mixer,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        is_parallel=not any(places[1:]),
        mixer_scale=scale * input_scale * getattr(layer, "attn_out_multiplier", 1.0),
        beside_scale=scale * getattr(layer, "ssm_out_multiplier", 1.0),
        mlp_scale=scale * getattr(parts.get("mlp"), "down_multiplier", 1.0),
    )


def _lone_part(part: Any, norm: Norm, rotary: nn.Module | None, found: Found) -> Layer:
    """Returns a layer of one part, which is a mixer or an MLP."""
    if mixer_of(part) is not None or "o_proj" in _parts(part):
        return Layer(mixer=_mixer(part, rotary, found), before_mixer=norm)
    return Layer(mlp=_mlp(part, None, found), before_mlp=norm)


def _mixer(
    mixer: Any, rotary: nn.Module | None, found: Found, input_scale: float = 1.0
) -> Attention | Recurrent:
    """`input_scale`: attention gets its input times this number. The caller scales its output by
    the same number, because the parts do not scale values."""
    recurrent = mixer_of(mixer)
    if recurrent is not None:
        return _recurrent(recurrent)
    attention = _attention(mixer, rotary, found)
    if input_scale == 1.0:
        return attention
    require(all(each.bias is None for each in attention.linears), "scaled inputs and biases")
    return replace(attention, scale=input_scale**2 * attention.scale)


def _recurrent(mixer: Mixer) -> Recurrent:
    parts = mixer.parts
    if parts is None:
        raise NotOfThisKindError(f"it has recurrent layers of an unknown kind ({mixer.name})")
    for linear in parts.linears:
        require(_is_linear(linear), f"a linear layer of type {type(linear).__name__}")
    if not isinstance(parts, RecurrenceParts):
        return Recurrent(mixer, parts, None)
    require(activation_of(parts.activation) == "silu", "a convolution without SiLU")
    num_values, given = parts.num_value_heads * parts.value_size, parts.norm
    if given is None:
        return Recurrent(mixer, parts, None)
    num_repeats = num_values // len(given.weight)
    require(num_repeats * len(given.weight) == num_values, "a norm of other values")
    weight = given.weight.repeat(num_repeats)
    return Recurrent(mixer, parts, Norm(weight, None, given.epsilon, RMS_NORM))


def _attention(attention: Any, rotary: nn.Module | None, found: Found) -> Attention:
    parts = _parts(attention)
    names = next((each for each in _PROJECTIONS if parts.keys() >= {*each}), ())
    is_known = names and "o_proj" in parts and parts.keys() <= _ATTENTION_PARTS
    require(bool(is_known), f"attention of {sorted(parts)}")
    config = attention.config
    require(getattr(config, "clip_qkv", None) is None, "a clip of queries, keys and values")
    rope = getattr(config, "rope_parameters", None) or {}
    require(not rope.get("llama_4_scaling_beta"), "queries that are scaled by their positions")
    qkv, output = _linears(parts, names), _linears(parts, ("o_proj",))[0]
    size, group = attention.head_dim, attention.num_key_value_groups
    outputs = [linear.out_features for linear in qkv]
    is_gated = len(outputs) == 3 and outputs[0] == 2 * output.in_features
    if is_gated:
        outputs[0] //= 2
    num_kv_heads = sum(outputs) // ((group + 2) * size)
    num_heads = num_kv_heads * group
    sizes = [num_heads * size, num_kv_heads * size, num_kv_heads * size]
    is_whole = outputs in (sizes, [sum(sizes)]) and output.in_features == sizes[0]
    require(is_whole, "projections that are not whole heads")
    norms, norms_rotated = _norms_of_heads(parts, found)
    norm_sizes = [len(norm.weight) for norm in norms if norm is not None]
    norms_whole_rows = norm_sizes == sizes[:2] != [size, size]
    require(norms_whole_rows or {*norm_sizes} <= {size}, f"norms of heads of size {norm_sizes}")
    require(not (norms_whole_rows and is_gated), "norms of whole rows and gates")
    return Attention(
        qkv=qkv,
        output=output,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        is_gated=is_gated,
        scale=float(attention.scaling) * getattr(attention, "key_multiplier", 1.0),
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=parts.get("sinks"),
        query_norm=norms[0],
        key_norm=norms[1],
        norms_whole_rows=norms_whole_rows,
        norms_rotated=norms_rotated,
        rotation=_rotation(attention, rotary, qkv[0].in_features),
    )


def _norms_of_heads(parts: dict[str, Any], found: Found) -> tuple[list[Norm | None], bool]:
    """Returns the norms of queries and keys, and whether they follow the rotation."""
    for names in _NORMS_OF_HEADS:
        if present := [name for name in names if name in parts]:
            require(len(present) == len(names), "a norm of queries or keys alone")
            return [Norm.of(parts[name], found) for name in names], names != _NORMS_OF_HEADS[0]
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


def _mlp(mlp: Any, shared: Any, found: Found) -> MLP:
    """`shared` is a dense MLP beside experts, or alone."""
    if not hasattr(mlp, "experts"):
        return dense_mlp(shared if mlp is None else mlp)
    experts = ExpertParts.of(mlp, dense_mlp, found)
    if shared is None:
        return experts
    require(experts.shared is None, "shared experts twice")
    return replace(experts, shared=dense_mlp(shared))


def dense_mlp(mlp: Any) -> DenseMLP:
    """Returns the parts of an MLP. Raises NotOfThisKindError if it has an unknown one."""
    parts = _parts(mlp)
    inputs = next(
        (
            each
            for each in (("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",))
            if parts.keys() - {"down_proj", "act_fn"} == {*each}
        ),
        (),
    )
    is_known = inputs and "down_proj" in parts
    require(bool(is_known), f"an MLP of {sorted(parts)}")
    return DenseMLP(
        inputs=_linears(parts, inputs),
        down=_linears(parts, ("down_proj",))[0],
        is_gated=inputs != ("up_proj",),
        activation=activation_of(parts.get("act_fn", nn.functional.silu)),
        gate_scale=getattr(mlp, "gate_multiplier", 1.0),
    )


def _linears(parts: dict[str, Any], names: tuple[str, ...]) -> tuple[nn.Linear, ...]:
    linears = tuple(parts[name] for name in names)
    for linear in linears:
        require(_is_linear(linear), f"a linear layer of type {type(linear).__name__}")
    return linears


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, QuantizedLinear)


def _parts(module: nn.Module) -> dict[str, Any]:
    """Returns modules and parameters by their usual names, except modules that have no effect."""
    parts: dict[str, Any] = {
        **{name: each for name, each in module.named_children() if type(each) is not nn.Dropout},
        **dict(module.named_parameters(recurse=False)),
    }
    return {_SYNONYMS.get(name, name): part for name, part in parts.items()}
