"""Which mixtures of experts are taken apart, and the reasons why others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe import modeling_qwen3_moe

from promptq.worker.engine.decoders.expert_parts import ExpertParts
from promptq.worker.engine.decoders.norm_parts import NotOfThisKindError
from promptq.worker.engine.device.expert_weights import misread_experts
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from tests.worker.engine.tiny_models import MIXTURES, make_model, mixture_of, save_model

FORMULAS = {
    "qwen3_moe": ("softmax", True),
    "mixtral": ("softmax", True),
    "olmoe": ("softmax", False),
    "qwen2_moe": ("softmax", False),
    "glm4_moe": ("sigmoid", True),
    "gpt_oss": ("softmax", True),
    "flex_olmo": ("softmax", True),
    "minimax_m2": ("sigmoid", True),
    "ernie4_5_moe": ("softmax", True),
    "phimoe": ("sparsemixer", False),
    "granitemoe": ("softmax", True),
    "exaone_moe": ("sigmoid", True),
    "flint": ("sigmoid", True),
    "cohere2_moe": ("softmax", True),
    "hunyuan_v1_moe": ("softmax", True),
    "lfm2_moe": ("sigmoid", True),
}


def mixture(family: str, seed: int) -> Any:
    return mixture_of(make_model(family, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_router_shows_its_formula(family: str, dtype: torch.dtype, seed: int) -> None:
    """Whatever rounding hides in 16 bits."""
    parts = ExpertParts.of(mixture(family, seed).to(dtype))
    assert (parts.routing.scores, parts.routing.normalizes) == FORMULAS[family]
    assert parts.routing.added_sum == (1e-6 if family == "lfm2_moe" else 1e-20)
    assert parts.router.dtype == torch.float32


def test_two_models_of_a_family_may_have_different_formulas(seed: int) -> None:
    for normalizes in (True, False):
        model: Any = make_model("qwen3_moe", seed, norm_topk_prob=normalizes)
        assert ExpertParts.of(model.model.layers[-1].mlp).routing.normalizes == normalizes


class OtherRouter(Qwen2MoeTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, shares, chosen = super().forward(hidden_states)
        return logits, shares**2, chosen


class CappedRouter(Qwen2MoeTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = 100.0 * torch.tanh(nn.functional.linear(hidden_states, self.weight) / 100.0)
        return logits, *logits.softmax(-1).topk(self.top_k)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an MLP of .*further": lambda mlp: mlp.add_module("further", nn.Linear(1, 1)),
    "experts of type Identity": lambda mlp: setattr(mlp, "experts", nn.Identity()),
    "experts of type Qwen2MoeExperts": lambda mlp: setattr(
        mlp.experts, "has_post_expert_norm", True
    ),
    "a router of type Linear": lambda mlp: setattr(mlp, "gate", nn.Linear(32, 8)),
    "a router of type Qwen2MoeTopKRouter": lambda mlp: mlp.gate.add_module("other", nn.Identity()),
    "a router with an unknown formula": lambda mlp: setattr(mlp.gate, "__class__", OtherRouter),
    "a router with an unknown formul.": lambda mlp: setattr(mlp.gate, "__class__", CappedRouter),
    "experts with an unknown activation": lambda mlp: setattr(mlp.experts, "act_fn", nn.Mish()),
    "experts with an unknown activatio.": lambda mlp: setattr(mlp.experts, "act_fn", nn.ReLU6()),
    "9 active experts of 8": lambda mlp: setattr(mlp.gate, "top_k", 9),
    "a gate of shared experts with a bias": lambda mlp: setattr(
        mlp, "shared_expert_gate", nn.Linear(32, 1)
    ),
    "an activation of type Mish": lambda mlp: setattr(mlp.shared_expert, "act_fn", nn.Mish()),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_mixture_with_another_part_is_refused(reason: str, seed: int) -> None:
    mlp = mixture("qwen2_moe", seed)
    ExpertParts.of(mlp)
    CHANGES[reason](mlp)
    with pytest.raises(NotOfThisKindError, match=reason):
        ExpertParts.of(mlp)


class SwappedExperts(modeling_qwen3_moe.Qwen3MoeExperts):
    """Its gate and up have changed places, and only what it computes shows that."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden_states)
        for row, hidden in enumerate(hidden_states):
            for index, share in zip(top_k_index[row], top_k_weights[row], strict=True):
                up, gate = (self.gate_up_proj[index] @ hidden).chunk(2)
                total[row] += share * (self.down_proj[index] @ (self.act_fn(gate) * up))
        return total


def test_experts_are_compared_with_their_module_in_16_bits(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our reading of them is not compared with itself."""
    directory = str(save_model(tmp_path, "qwen3_moe", seed))
    options = LoadOptions(device="cpu", dtype="bfloat16", kv_cache_memory=2**20)
    assert load_runner(directory, options).why_no_own_code == ""
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", SwappedExperts)
    assert "its logits are off by" in load_runner(directory, options).why_no_own_code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", MIXTURES)
def test_our_reading_of_experts_is_that_of_their_module(
    family: str, dtype: torch.dtype, seed: int
) -> None:
    model: Any = make_model(family, seed).to(dtype)
    assert misread_experts(model) == set()
