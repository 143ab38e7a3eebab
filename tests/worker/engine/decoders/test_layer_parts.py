"""Which models are taken apart, and how unknown parts are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen3 import modeling_qwen3

from promptq.worker.engine.decoders.attention_parts import Attention
from promptq.worker.engine.decoders.layer_parts import Layer, ModelParts, has_known_parts
from promptq.worker.engine.decoders.norm_parts import Norm, NotOfThisKindError
from promptq.worker.engine.decoders.rotation_parts import Rotation, RotationTables
from tests.worker.engine.tiny_models import FAMILIES, NATIVE, make_model


class OtherLinear(nn.Linear):
    """Stands for a quantized layer of another library."""


class OtherEmbedding(nn.Embedding):
    """Stands for an embedding that does something else with its rows."""


class OtherNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.02 * super().forward(x)


def rotation_of(layer: Layer) -> Rotation | None:
    assert isinstance(layer.mixer, Attention)
    return layer.mixer.rotation


class ScaledAttention(modeling_qwen3.Qwen3Attention):
    """Its scores are larger far behind the begin of a text."""

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        factor = 1.0 + torch.log(1.0 + torch.floor(others["position_ids"] / 8192.0))
        return super().forward(hidden_states * factor.unsqueeze(-1), **others)


def reads_inputs(layer: Any) -> None:
    """Adds the part with which Gemma 4 reads inputs of layers."""
    for name in ("per_layer_input_gate", "per_layer_projection"):
        layer.add_module(name, nn.Linear(32, 32, bias=False))
    layer.add_module("post_per_layer_input_norm", nn.RMSNorm(32, eps=1e-6))
    layer.add_module("act_fn", nn.SiLU())


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "other parts: .*further": lambda model, layer: model.model.add_module("further", nn.Identity()),
    "a layer of .*further": lambda model, layer: layer.add_module("further", nn.Identity()),
    "attention of .*gate": lambda model, layer: layer.self_attn.add_module("gate", nn.Identity()),
    "attention of .*bias": lambda model, layer: layer.self_attn.register_parameter(
        "bias", nn.Parameter(torch.zeros(4))
    ),
    "an MLP of .*router": lambda model, layer: layer.mlp.add_module("router", nn.Identity()),
    "an activation of type Tanh": lambda model, layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "an activation of type ReLU6": lambda model, layer: setattr(layer.mlp, "act_fn", nn.ReLU6()),
    "an activation of type ClippedGELU": lambda model, layer: setattr(
        layer.mlp, "act_fn", ACT2FN["gelu_10"]
    ),
    "an embedding of type OtherEmbedding": lambda model, layer: setattr(
        model.model, "embed_tokens", OtherEmbedding(97, 32)
    ),
    "a linear layer of type OtherLinear": lambda model, layer: setattr(
        layer.mlp, "down_proj", OtherLinear(48, 32, bias=False)
    ),
    "a norm of type OtherNorm": lambda model, layer: setattr(
        layer, "input_layernorm", OtherNorm(32, eps=1e-6)
    ),
    "norms of heads of size": lambda model, layer: setattr(
        layer.self_attn.q_norm, "weight", nn.Parameter(torch.ones(32))
    ),
    "a norm of queries or keys alone": lambda model, layer: delattr(layer.self_attn, "k_norm"),
    "projections that are not whole heads": lambda model, layer: setattr(
        layer.self_attn, "num_key_value_groups", 4
    ),
    "a clip of queries": lambda model, layer: setattr(layer.self_attn.config, "clip_qkv", 8.0),
    "attention that reads positions beside its rotation": lambda model, layer: setattr(
        layer.self_attn, "__class__", ScaledAttention
    ),
    "inputs of some of its layers": lambda model, layer: reads_inputs(layer),
    "an output layer of another kind": lambda model, layer: setattr(
        model, "lm_head", OtherLinear(32, 97)
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_an_unknown_part_is_named(reason: str, seed: int) -> None:
    model: Any = make_model("qwen3", seed)
    ModelParts.of(model)
    CHANGES[reason](model, model.model.layers[1])
    with pytest.raises(NotOfThisKindError, match=reason):
        ModelParts.of(model)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("longcat_flash", {}, "a layer of .*mlps"),
        ("nemotron_h", {"moe_latent_size": 16}, "an MLP of .*fc1_latent_proj"),
    ],
)
def test_the_unknown_part_of_a_family_is_named(
    family: str, settings: dict[str, Any], reason: str, seed: int
) -> None:
    """The library's modules serve these families."""
    with pytest.raises(NotOfThisKindError, match=reason):
        ModelParts.of(make_model(family, seed, **settings))


@pytest.mark.matrix(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_known_before_weights_are_loaded(family: str) -> None:
    """Whether a saved format is kept is decided for a model without values."""
    model: Any = make_model(family)
    assert has_known_parts(model.to("meta")) == (family in NATIVE)


@pytest.mark.parametrize(
    ("family", "settings", "rotates"),
    [
        ("qwen3", {}, [True, True]),
        ("smollm3", {}, [True, False]),
        ("cohere2", {}, [True, False] * 2),
        ("exaone4", {}, [True, False] * 2),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, [True] * 4),
        ("exaone_moe", {}, [True, False] * 2),
        ("flint", {}, [True, False] * 2),
        ("cohere2_moe", {}, [True, False] * 2),
        ("ministral3", {}, []),
    ],
)
def test_layers_without_rotation_are_found_by_what_they_compute(
    family: str, settings: dict[str, Any], rotates: list[bool], seed: int
) -> None:
    model: Any = make_model(family, seed, **settings)
    size: int = model.config.hidden_size
    body, found = model.get_decoder(), []
    for layer in body.layers:
        rotation = Rotation(body.rotary_emb, None, None)
        with suppress(NotOfThisKindError):  # it reads positions beside the rotation
            found.append(rotation.is_of(layer.self_attn, size))
    assert found == rotates


@pytest.mark.matrix(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(NATIVE))
def test_norms_are_described_to_the_last_bit(family: str, dtype: torch.dtype, seed: int) -> None:
    model: Any = make_model(family, seed).to(dtype)
    module = next(
        each
        for name, each in model.get_decoder().layers[0].named_children()
        if name.endswith("norm")
    )
    norm = Norm.of(module)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found, wanted = norm.formula(x, norm.weight, norm.bias, norm.epsilon), module(x)
    off = (found.float() - wanted.float()).abs() / wanted.float().abs().clamp_min(1e-3)
    assert float((off > 1e-5).float().mean()) < (0.001 if norm.bias is None else 0.2)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "glm4", "cohere2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations_are_those_of_the_models_own_module(
    family: str, dtype: torch.dtype, seed: int
) -> None:
    """In the dtype that is asked for, and for each type of layer."""
    model: Any = make_model(family, seed)
    like = torch.empty(1, dtype=dtype)
    rotations = {rotation_of(layer) for layer in ModelParts.of(model).layers} - {None}
    assert len(rotations) == (2 if family == "gemma3_text" else 1)
    for rotation in rotations:
        assert rotation is not None
        tables = rotation.tables(20, like)
        further = () if rotation.layer_type is None else (rotation.layer_type,)
        cosine, sine = rotation.module(like, torch.arange(20).unsqueeze(0), *further)
        heads = torch.randn(20, cosine.shape[-1], generator=torch.Generator().manual_seed(seed))
        assert rotation.apply is not None
        whole = heads[None, None]
        wanted = rotation.apply(whole, whole, cosine.float(), sine.float())[0][0, 0]
        in_float32 = RotationTables(
            tables.cosine.float(), tables.sine.float(), tables.is_interleaved
        )
        torch.testing.assert_close(in_float32.rotated(heads), wanted)
        assert tables.cosine.dtype == tables.sine.dtype == dtype


def test_a_rotation_of_another_kind_is_named(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_qwen3.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: plain(q, k, cos, -sin)
    )
    rotation = rotation_of(ModelParts.of(make_model("qwen3", seed)).layers[0])
    assert rotation is not None
    with pytest.raises(NotOfThisKindError, match="a rotation of another kind"):
        rotation.tables(20, torch.empty(1))
