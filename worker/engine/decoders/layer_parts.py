"""Describes a library's model as layers that are put together from known parts.

The names, shapes and types of modules show which parts a layer has. The formula of a norm, an
activation or a rotation shows in what the module computes from a few numbers. The check at load
compares a decoder's result with the library's model. So it detects a family that has the same
names but another formula. The library's modules serve such a family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from promptq.worker.engine.decoders.attention_parts import Attention
from promptq.worker.engine.decoders.expert_parts import ExpertParts
from promptq.worker.engine.decoders.experts_beside import PARTS_BESIDE, ExpertsBeside
from promptq.worker.engine.decoders.layer_inputs import (
    PARTS_OF_LAYER,
    PARTS_OF_MODEL,
    LayerInput,
    LayerInputs,
)
from promptq.worker.engine.decoders.mlp_parts import DenseMLP, activation_of
from promptq.worker.engine.decoders.named_parts import is_linear, parts_of, scale_of_embedding
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
"""The places of a layer's norms, by the set of their names."""

_MIXERS = {"self_attn", "linear_attn", "mamba", "conv"}
"""The names of what mixes positions."""

_BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}

MLP = DenseMLP | ExpertParts
"""The kinds of MLP that a layer may have."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent layer."""

    mixer: Mixer
    """The library's module, and the shape of its states."""
    parts: RecurrentParts
    norm: Norm | None
    """The norm of a RecurrenceParts, for all values."""

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return self.parts.linears


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: `hidden += scale * after(mixer(before(hidden)))`, then the same with the MLP.

    Any of the norms may be missing. At the end, `hidden *= output_scale`.
    """

    mixer: Attention | Recurrent
    """The part that mixes positions."""
    mlp: MLP
    before_mixer: Norm | None
    after_mixer: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    is_parallel: bool
    """Whether the MLP has the input of the mixer."""
    residual_scale: float
    beside: ExpertsBeside | None
    """Experts whose results are added to those of the MLP."""
    input: LayerInput | None
    """The part that reads the layer's inputs of ModelParts, after the MLP."""
    output_scale: float

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of the large weights."""
        of_input = self.input.linears if self.input else ()
        beside = self.beside.experts.modules if self.beside else ()
        return (*self.mixer.linears, *self.mlp.modules, *beside, *of_input)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A whole model. Linear layers and the embedding may be quantized. Tensors are the model's
    parameters, not copies."""

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
        """Returns the parts of a model, of which `num_attending` layers attend, if that is known.

        Raises NotOfThisKindError if the model has an unknown part.
        """
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
        num_attentions = sum(isinstance(layer.mixer, Attention) for layer in layers)
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
    parts = parts_of(layer)
    mixing = _MIXERS & parts.keys()
    of_input = PARTS_OF_LAYER if parts.keys() >= PARTS_OF_LAYER else set()
    beside = PARTS_BESIDE if parts.keys() >= PARTS_BESIDE else set()
    norms = frozenset(parts.keys() - mixing - of_input - beside - {"mlp", "shared_mlp"})
    is_known = norms in _NORM_PLACES and len(mixing) == 1 and {"mlp", "shared_mlp"} & parts.keys()
    require(bool(is_known), f"a layer of {sorted(parts)}")
    places, mixer = _NORM_PLACES[norms], parts[mixing.pop()]
    before_mixer, after_mixer, before_mlp, after_mlp = (
        Norm.of(parts[name], found) if name else None for name in places
    )
    recurrent = mixer_of(mixer)
    require(not beside or after_mlp is not None, "experts beside an MLP without a norm")
    scale = getattr(layer, "layer_scalar", None)
    return Layer(
        mixer=Attention.of(mixer, rotary, found) if recurrent is None else _recurrent(recurrent),
        mlp=_mlp(parts.get("mlp"), parts.get("shared_mlp"), found),
        before_mixer=before_mixer,
        after_mixer=after_mixer,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        is_parallel=not any(places[1:]),
        residual_scale=getattr(layer, "residual_multiplier", 1.0),
        beside=ExpertsBeside.of(parts, found) if beside else None,
        input=LayerInput.of(parts, found) if of_input else None,
        output_scale=1.0 if scale is None or scale.is_meta else float(scale),
    )


def _recurrent(mixer: Mixer) -> Recurrent:
    parts = mixer.parts
    if parts is None:
        raise NotOfThisKindError(f"it has recurrent layers of an unknown kind ({mixer.name})")
    for linear in parts.linears:
        require(is_linear(linear), f"a linear layer of type {type(linear).__name__}")
    if not isinstance(parts, RecurrenceParts):
        return Recurrent(mixer, parts, None)
    require(activation_of(parts.activation) == "silu", "a convolution without SiLU")
    num_values, given = parts.num_value_heads * parts.value_size, parts.norm
    num_repeats = num_values // len(given.weight)
    require(num_repeats * len(given.weight) == num_values, "a norm of other values")
    weight = given.weight.repeat(num_repeats)
    return Recurrent(mixer, parts, Norm(weight, None, given.epsilon, RMS_NORM))


def _mlp(mlp: Any, shared: Any, found: Found) -> MLP:
    """`shared` is a dense MLP beside experts, or alone."""
    if not hasattr(mlp, "experts"):
        return DenseMLP.of(shared if mlp is None else mlp)
    experts = ExpertParts.of(mlp, found)
    if shared is None:
        return experts
    require(experts.shared is None, "shared experts twice")
    return replace(experts, shared=DenseMLP.of(shared))
