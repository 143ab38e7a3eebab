"""Mixtures of experts in native code give what the library's modules give."""

from __future__ import annotations

from ctypes import byref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from promptq.worker.engine.decoders.expert_parts import Expert, ExpertParts
from promptq.worker.engine.decoders.native import NativeDecoder, UnpackedDecoder
from promptq.worker.engine.device.expert_weights import input_weights
from promptq.worker.engine.native.library import load_native
from promptq.worker.engine.quantization.modules import quantize_model
from tests.worker.engine.tiny_models import MIXTURES, assert_near, make_model, mixture_of

SEED = 13
SIZE = 32


@cache
def mixture(family: str, **overrides: Any) -> Any:
    """The last layer's mixture of a random model."""
    model: Any = make_model(family, SEED, **overrides)
    model.set_experts_implementation("eager")  # the other one knows no odd sizes
    return mixture_of(model)


def rows(count: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(SEED)).to(dtype)


def computed(
    parts: ExpertParts, x: torch.Tensor, *, is_packed: bool = True, num_threads: int = 2
) -> torch.Tensor:
    y = torch.full_like(x, torch.nan)
    decoder: Any = object.__new__(NativeDecoder if is_packed else UnpackedDecoder)
    decoder._dtype, decoder._kept, decoder._copied = x.dtype, [], []
    load_native().experts(
        *(x.dtype == torch.bfloat16, is_packed, x.data_ptr(), *x.shape),
        *(byref(decoder._experts(parts)), num_threads, y.data_ptr()),
    )
    return y


@torch.inference_mode()
def expected(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    y = mlp(x.unsqueeze(0))
    result: torch.Tensor = (y[0] if isinstance(y, tuple) else y)[0]
    return result


@pytest.mark.parametrize("family", [*MIXTURES, "nemotron_h"])
def test_each_familys_experts(family: str) -> None:
    """Whatever its router and its activation, and however its weights lie."""
    mlp, x = mixture(family), rows(41)
    parts = ExpertParts.of(mlp)
    wanted = expected(mlp, x)
    assert wanted.abs().mean() > 0.01
    for is_packed in (True, False):
        for num_threads in (1, 3):
            y = computed(parts, x, is_packed=is_packed, num_threads=num_threads)
            assert_near(y, wanted)


def test_transposed_experts_are_read_in_place() -> None:
    """The check at load has no copy of all experts of a model."""
    mlp, decoder = mixture("gpt_oss"), object.__new__(UnpackedDecoder)
    decoder._dtype, decoder._kept, decoder._copied = torch.float32, [], []
    decoder._experts(ExpertParts.of(mlp))
    whole = {each.untyped_storage().data_ptr() for each in mlp.experts.parameters()}
    experts = [each for each in decoder._kept if isinstance(each, Expert)]
    assert len(experts) == 8
    for gate, up, down, *_ in experts:
        assert {each.untyped_storage().data_ptr() for each in (gate, up, down)} <= whole


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe", "gpt_oss", "phimoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_is_to_the_last_bit_as_it_is_alone(family: str, dtype: torch.dtype) -> None:
    model: Any = make_model(family, SEED)
    parts, x = ExpertParts.of(model.to(dtype).model.layers[-1].mlp), rows(600, dtype)
    together = computed(parts, x)
    alone = torch.cat([computed(parts, row) for row in x[::37].split(1)])
    assert torch.equal(together[::37], alone)
    assert torch.equal(computed(parts, x[5:19], num_threads=3), together[5:19])


@pytest.mark.parametrize(
    "shape",
    [
        {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
        {"num_experts": 7, "num_experts_per_tok": 7, "moe_intermediate_size": 1},
        {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 100},
        {"num_experts": 70, "num_experts_per_tok": 2, "moe_intermediate_size": 65},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
@pytest.mark.parametrize("count", [1, 3, 300])
def test_odd_sizes(shape: dict[str, int], count: int) -> None:
    mlp, x = mixture("qwen3_moe", **shape), rows(count)
    for is_packed in (True, False):
        y = computed(ExpertParts.of(mlp), x, is_packed=is_packed)
        assert_near(y, expected(mlp, x))


def test_all_rows_to_one_expert_and_none_to_others() -> None:
    """More rows than an expert multiplies at a time."""
    mlp, x = mixture("minimax_m2"), rows(700)
    bias = mlp.e_score_correction_bias
    before = bias.clone()
    bias[:] = torch.tensor([0.0, 100.0, 0.0, 0.0, 90.0, 0.0, 95.0, 0.0])
    try:
        parts = ExpertParts.of(mlp)
        chosen = parts.routing.shares(x @ parts.router.T) > 0
        assert chosen.sum(0).tolist() == [0, 700, 0, 0, 700, 0, 700, 0]
        assert_near(computed(parts, x), expected(mlp, x))
    finally:
        bias[:] = before


@torch.inference_mode()
def test_a_number_is_added_to_the_sum_of_shares() -> None:
    parts, x = ExpertParts.of(mixture("lfm2_moe")), rows(9)
    routing = parts.routing
    sums = replace(routing, normalizes=False).shares(x @ parts.router.T).sum(-1, keepdim=True)
    wanted = computed(parts, x) * sums / (sums + 0.5)
    added = replace(parts, routing=replace(routing, added_sum=0.5))
    assert_near(computed(added, x), wanted)


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    parts, x = ExpertParts.of(mixture("glm4_moe")), rows(9)
    sound = computed(parts, x)
    x[4, 7] = torch.nan
    y = computed(parts, x)
    assert not y[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(y[others], sound[others])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "nemotron_h"])
def test_quantized_experts(family: str, bits: int) -> None:
    """Like the module with the same rounded weights, up to the rounding of inputs to 8 bits."""
    model: Any = make_model(family, SEED)
    plain = mixture(family)
    quantize_model(model, bits, 32)
    mlp, x = mixture_of(model), rows(50)
    assert input_weights(mlp.experts.plain).numel() == 0
    parts = ExpertParts.of(mlp)
    wanted = expected(mlp, x)
    assert 0.001 < (expected(plain, x) - wanted).norm() / wanted.norm() < 0.5
    exact = computed(parts, x, is_packed=False)
    assert_near(exact, wanted)
    assert (computed(parts, x) - wanted).norm() < 0.05 * wanted.norm()
