"""Which models are taken apart, and what is said of those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from promptq.worker.engine.decoders.llama_parts import LlamaParts, NotOfThisKindError
from tests.worker.engine.tiny_models import make_model


class OtherLinear(nn.Linear):
    """Stands for a quantised layer."""


def with_bias(linear: nn.Linear) -> None:
    linear.bias = nn.Parameter(torch.zeros(linear.out_features))


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "other parts": lambda model, layer: model.model.add_module("further", nn.Identity()),
    "a layer of .*further": lambda model, layer: layer.add_module("further", nn.Identity()),
    "attention of .*sink": lambda model, layer: layer.self_attn.add_module("sink", nn.Identity()),
    "an MLP of .*router": lambda model, layer: layer.mlp.add_module("router", nn.Identity()),
    "an activation other than SiLU": lambda model, layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    "a linear layer of type OtherLinear": lambda model, layer: setattr(
        layer.mlp, "down_proj", OtherLinear(48, 32, bias=False)
    ),
    "an MLP with biases": lambda model, layer: with_bias(layer.mlp.up_proj),
    "biases in some of the projections": lambda model, layer: with_bias(layer.self_attn.k_proj),
    "norms that are not all RMS norms": lambda model, layer: setattr(
        layer, "input_layernorm", nn.LayerNorm(32)
    ),
    "norms across heads": lambda model, layer: setattr(
        layer.self_attn.q_norm, "weight", nn.Parameter(torch.ones(32))
    ),
    "a norm of queries or keys alone": lambda model, layer: delattr(layer.self_attn, "k_norm"),
    "layers with different heads": lambda model, layer: setattr(layer.self_attn, "scaling", 2.0),
    "an output layer with a bias": lambda model, layer: with_bias(model.lm_head),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_model_with_another_part_is_refused(reason: str, seed: int) -> None:
    model: Any = make_model("qwen3", seed)
    LlamaParts.of(model)
    CHANGES[reason](model, model.model.layers[1])
    with pytest.raises(NotOfThisKindError, match=reason):
        LlamaParts.of(model)


def test_rotations_are_those_of_the_models_own_module(seed: int) -> None:
    """In the dtype that is asked for."""
    model: Any = make_model("qwen3", seed)
    for dtype in (torch.float32, torch.bfloat16):
        like = torch.empty(1, dtype=dtype)
        cosine, sine = LlamaParts.of(model).rotations(20, like)
        expected = model.model.rotary_emb(like, torch.arange(20).unsqueeze(0))
        assert torch.equal(cosine, expected[0][0])
        assert torch.equal(sine, expected[1][0])
        assert cosine.dtype == dtype
