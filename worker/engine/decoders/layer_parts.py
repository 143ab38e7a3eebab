"""Describes a transformers model as layers that are composed of known parts.

The names, shapes and types of modules show which parts a layer has. To find the formula of a norm,
an activation or a rotation, promptq runs the module on a few numbers. A family may have known names
but an unknown formula. So the check at load compares a decoder's results with the results of the
transformers model. If the results differ, transformers' modules serve the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.decoders.attention_parts import Attention
from promptq.worker.engine.decoders.expert_parts import ExpertParts
from promptq.worker.engine.decoders.experts_beside import PARTS_BESIDE, ExpertsBeside
from promptq.worker.engine.decoders.latent_parts import LatentAttention
from promptq.worker.engine.decoders.layer_inputs import (
    PARTS_OF_LAYER,
    PARTS_OF_MODEL,
    LayerInput,
    LayerInputs,
)
from promptq.worker.engine.decoders.mlp_parts import DenseMLP, activation_of
from promptq.worker.engine.decoders.named_parts import (
    is_linear,
    parts_of,
    require_linears,
    scale_of_embedding,
)
from promptq.worker.engine.decoders.norm_parts import (
    RMS_NORM,
    Found,
    Norm,
    NotOfThisKindError,
    require,
)
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
"""Maps a set of norm names to the norms before and after the mixer, before and after the MLP."""

_MIXERS = ("self_attn", "linear_attn", "mamba", "conv")
"""Names of modules that mix positions. A layer may have both attention and Mamba 2."""
_LONE = {"norm", "mixer"}
"""The names of the modules in a layer that has only a norm and one part of any kind."""

_BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}

Attending = Attention | LatentAttention
"""The kinds of attention that a layer may have."""
MLP = DenseMLP | ExpertParts
"""The kinds of MLP that a layer may have."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    mixer: Mixer
    """The mixer of the transformers module, which knows the shapes of the states."""
    parts: RecurrentParts
    norm: Norm | None
    """The norm over all values of a gated linear recurrence; None if there is no norm."""

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return self.parts.linears


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: `hidden += scale * after(mixer(before(hidden)))`, then the same formula with the
    MLP. A layer may lack norms, the mixer or the MLP. At the end, `hidden *= output_scale`."""

    mixer: Attending | Recurrent | None = None
    """The part that mixes positions; None if the layer has none."""
    recurrent_beside: Recurrent | None = None
    """A recurrent part with the same input as the attention. The results of both are added."""
    mlp: MLP | None = None
    experts_beside: ExpertsBeside | None = None
    """Experts whose results are added to the MLP's results."""
    input: LayerInput | None = None
    """The part that reads additional inputs, after the MLP (see LayerInputs)."""
    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    is_parallel: bool = False
    """Whether the MLP has the same input as the mixer."""
    mixer_scale: float = 1.0
    beside_scale: float = 1.0
    """The factor of the result of `recurrent_beside`."""
    mlp_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def recurrent(self) -> Recurrent | None:
        """The recurrent part; None if the layer has none."""
        return self.mixer if isinstance(self.mixer, Recurrent) else self.recurrent_beside

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that have large weights."""
        with_linears = (self.mixer, self.recurrent_beside, self.input)
        linears = chain(*(part.linears for part in with_linears if part is not None))
        experts = None if self.experts_beside is None else self.experts_beside.experts
        mlps = chain(*(mlp.modules for mlp in (self.mlp, experts) if mlp is not None))
        return (*linears, *mlps)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a whole model. Linear layers and the embedding may be quantized. Tensors are the
    model's parameters, not copies."""

    embedding: nn.Embedding
    embedding_scale: float
    inputs: LayerInputs | None
    layers: list[Layer]
    norm: Norm
    head: nn.Linear  # its weight may be that of the embedding
    logit_scale: float
    logit_softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, num_attending: int | None = None) -> ModelParts:
        """Returns a model's parts. `num_attending` is the number of layers with attention; None if
        unknown. Raises NotOfThisKindError if the model has an unknown part."""
        whole: Any = model  # its class is only partly typed
        config = whole.config.get_text_config(decoder=True)
        body = whole.get_decoder()
        parts = parts_of(body)
        names = parts.keys() - (PARTS_OF_MODEL if parts.keys() >= PARTS_OF_MODEL else set())
        is_known = _BODY_PARTS - {"rotary_emb"} <= names <= _BODY_PARTS
        require(is_known, f"other parts: {sorted(parts)}")
        embedding, head = parts["embed_tokens"], whole.get_output_embeddings()
        dtype = parts["norm"].weight.dtype
        scale = scale_of_embedding(embedding, dtype)
        require(is_linear(head), "an output layer of another kind")
        found: Found = {}
        layers = [layer_of(layer, parts.get("rotary_emb"), found) for layer in parts["layers"]]
        num_attentions = sum(isinstance(layer.mixer, Attending) for layer in layers)
        require(num_attending in (None, num_attentions), "layers without attention")
        has_inputs = names != parts.keys()
        is_whole = all((layer.input is not None) == has_inputs for layer in layers)
        require(is_whole, "inputs of some of its layers")
        return cls(
            embedding=embedding,
            embedding_scale=getattr(body, "embedding_multiplier", 1.0) if scale is None else scale,
            inputs=LayerInputs.of(body, parts, dtype, found) if has_inputs else None,
            layers=layers,
            norm=Norm.of(parts["norm"], found),
            head=head,
            logit_scale=getattr(whole, "logit_scale", 1.0)
            * getattr(body, "lm_head_multiplier", 1.0)
            / (getattr(config, "logits_scaling", None) or 1.0),
            logit_softcap=getattr(config, "final_logit_softcapping", None),
        )


def has_known_parts(model: PreTrainedModel) -> bool:
    """Whether all parts of a model have known names and types. Does not test whether the
    parts compute what their names say."""
    try:
        ModelParts.of(model)
    except Exception:  # a family may have anything under these names
        return False
    return True


def specs_of_latents(
    model: PreTrainedModel,
    specs: list[LayerSpec],
    spec_of: Callable[[LatentAttention, LayerSpec], LayerSpec],
) -> list[LayerSpec]:
    """Returns the specs of a KV cache for attention layers recorded as `specs`. `spec_of` returns
    the spec of a layer with latent attention. Raises NotOfThisKindError if the model has an unknown
    part."""
    if not any(map(LatentAttention.knows, model.modules())):
        return specs  # finding all parts takes longer
    mixers = [layer.mixer for layer in ModelParts.of(model, len(specs)).layers]
    attending = [mixer for mixer in mixers if isinstance(mixer, Attending)]
    return [
        spec_of(part, spec) if isinstance(part, LatentAttention) else spec
        for part, spec in zip(attending, specs, strict=True)
    ]


def layer_of(layer: Any, rotary: nn.Module | None, found: Found) -> Layer:
    """Returns the parts of a decoder layer. `rotary` computes the model's rotations, and `found` is
    a cache of formulas. Raises NotOfThisKindError if a part is unknown."""
    parts = parts_of(layer)
    if parts.keys() == _LONE:
        return _lone_part(parts["mixer"], Norm.of(parts["norm"], found), rotary, found)
    mixing = [name for name in _MIXERS if name in parts]
    of_input = PARTS_OF_LAYER if parts.keys() >= PARTS_OF_LAYER else set()
    beside = PARTS_BESIDE if parts.keys() >= PARTS_BESIDE else set()
    norms = frozenset(parts.keys() - {*mixing} - of_input - beside - {"mlp", "shared_mlp"})
    mixes = len(mixing) == 1 or mixing == ["self_attn", "mamba"]
    has_mlp = not {"mlp", "shared_mlp"}.isdisjoint(parts)
    require(mixes and has_mlp and norms in _NORM_PLACES, f"a layer of {sorted(parts)}")
    places = _NORM_PLACES[norms]
    before_mixer, after_mixer, before_mlp, after_mlp = (
        Norm.of(parts[name], found) if name else None for name in places
    )
    require(not beside or after_mlp is not None, "experts beside an MLP without a norm")
    input_scale = getattr(layer, "attention_in_multiplier", 1.0)
    mixer, recurrent_beside = (
        _mixer(parts[name], rotary, found, input_scale) if name else None
        for name in (*mixing, None)[:2]
    )
    assert not isinstance(recurrent_beside, Attending), "Mamba 2 is recurrent"
    scale = getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))
    output_scale = getattr(layer, "layer_scalar", None)
    return Layer(
        mixer=mixer,
        recurrent_beside=recurrent_beside,
        mlp=_mlp(parts.get("mlp"), parts.get("shared_mlp"), found),
        experts_beside=ExpertsBeside.of(parts, found) if beside else None,
        input=LayerInput.of(parts, found) if of_input else None,
        before_mixer=before_mixer,
        after_mixer=after_mixer,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        is_parallel=not any(places[1:]),
        mixer_scale=scale * input_scale * getattr(layer, "attn_out_multiplier", 1.0),
        beside_scale=scale * getattr(layer, "ssm_out_multiplier", 1.0),
        mlp_scale=scale * getattr(parts.get("mlp"), "down_multiplier", 1.0),
        output_scale=1.0 if output_scale is None or output_scale.is_meta else float(output_scale),
    )


def _lone_part(part: Any, norm: Norm, rotary: nn.Module | None, found: Found) -> Layer:
    if mixer_of(part) is not None or "o_proj" in parts_of(part):
        return Layer(mixer=_mixer(part, rotary, found), before_mixer=norm)
    return Layer(mlp=_mlp(part, None, found), before_mlp=norm)


def _mixer(
    mixer: Any, rotary: nn.Module | None, found: Found, input_scale: float = 1.0
) -> Attending | Recurrent:
    """Returns the parts of a mixer. The model multiplies the mixer's inputs by `input_scale`.

    For attention, the scale of scores includes `input_scale` twice: for queries and for keys.
    Values are not scaled, so the caller must multiply the output by `input_scale`.
    """
    recurrent = mixer_of(mixer)
    if recurrent is not None:
        return _recurrent(recurrent)
    if LatentAttention.knows(mixer):
        return LatentAttention.of(mixer, rotary, found)
    attention = Attention.of(mixer, rotary, found)
    if input_scale == 1.0:
        return attention
    require(all(each.bias is None for each in attention.linears), "scaled inputs and biases")
    return replace(attention, scale=input_scale**2 * attention.scale)


def _recurrent(mixer: Mixer) -> Recurrent:
    parts = mixer.parts
    if parts is None:
        raise NotOfThisKindError(f"it has recurrent layers of an unknown kind ({mixer.name})")
    require_linears(parts.linears)
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


def _mlp(mlp: Any, shared: Any, found: Found) -> MLP:
    """Returns the parts of an MLP. `shared` is a dense MLP beside experts, or the only MLP."""
    if not hasattr(mlp, "experts"):
        return DenseMLP.of(shared if mlp is None else mlp)
    experts = ExpertParts.of(mlp, found)
    if shared is None:
        return experts
    require(experts.shared is None, "shared experts twice")
    return replace(experts, shared=DenseMLP.of(shared))
