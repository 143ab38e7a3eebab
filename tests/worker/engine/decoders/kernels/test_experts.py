"""Mixtures of experts in Triton's interpreter, or with TRITON_INTERPRET=0 on a GPU."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import off_by, poisoned_memory, random_weight
from promptq.worker.engine.decoders.expert_parts import SCORES, ExpertParts, Routing
from promptq.worker.engine.decoders.kernels import grouped_product
from promptq.worker.engine.decoders.kernels.experts import choose_experts
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder, fused_mlp
from promptq.worker.engine.decoders.kernels.grouped_product import GroupedProduct, Groups
from promptq.worker.engine.quantization.modules import quantize_model
from tests.worker.engine.tiny_models import MIXTURES, assert_near, make_model, mixture_of


def random_routing(draw: random.Random, generator: torch.Generator, scores: str) -> Routing:
    if scores == "sparsemixer":  # it has nothing else
        return Routing(draw.choice([4, 10]), draw.randint(1, 4), scores, jitter=0.1)
    num_groups = draw.choice([1, 3])
    num_experts = num_groups * draw.choice([2, 4, 5])
    top_groups = draw.randint(1, num_groups)
    bias = 0.3 * torch.randn(num_experts, generator=generator).to(DEVICE)
    return Routing(
        num_experts=num_experts,
        top_k=draw.randint(1, min(4, top_groups * num_experts // num_groups)),
        scores=scores,
        choice_bias=bias if draw.random() < 0.5 else None,
        num_groups=num_groups,
        top_groups=top_groups,
        normalizes=draw.random() < 0.5,
        added_sum=draw.choice([1e-20, 0.1]),
        scale=draw.choice([1.0, 2.5]),
    )


@pytest.mark.parametrize("scores", SCORES)
def test_experts_are_chosen_as_routing_describes(scores: str, seed: int) -> None:
    """Columns after those of the experts are ignored."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(4):
        routing = random_routing(draw, generator, scores)
        print(routing)
        logits = torch.randn(6, routing.num_experts + 1, generator=generator).to(DEVICE)
        with poisoned_memory():
            experts, shares = choose_experts(routing, logits)
        wanted = routing.shares(logits[:, :-1])
        found = torch.zeros_like(wanted).scatter(1, experts.long(), shares)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, the interpreter's
@pytest.mark.parametrize("scores", SCORES)
def test_experts_exist_even_if_logits_are_not_numbers(scores: str) -> None:
    """So that such a row reads no other memory and disturbs nobody."""
    routing = Routing(6, 2, scores, num_groups=3, top_groups=1)
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    logits[1, 2] = 3.0
    experts, shares = choose_experts(routing, logits)
    assert ((experts >= 0) & (experts < 6)).all()
    assert shares[0].isnan().all()


def test_pairs_are_sorted_by_expert(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, as many pairs are."""
    monkeypatch.setattr(grouped_product, "_SORTED_AT_ONCE", 16)
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(1, 7, (9, 4), generator=generator).to(DEVICE, torch.int32)
    groups = Groups.of(experts, 8)
    assert groups.order.tolist() == experts.flatten().sort(stable=True).indices.tolist()
    counts = experts.flatten().bincount(minlength=8)
    assert groups.starts.tolist() == [0, *counts.cumsum(0).tolist()]


WEIGHTS = ["plain", "transposed", (8, None, False), (4, 32, True)]
"""Quantized ones: bits, group, and whether there are offsets."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_pair_is_multiplied_with_its_experts_weight(
    kind: Any, dtype: torch.dtype, seed: int
) -> None:
    """Of few rows and of many, some experts without rows. A row has the bits that it has alone."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_experts, top_k = 5, draw.choice([1, 2])
    outputs, inputs = draw.choice([40, 150]), draw.choice([64, 100])
    bias = torch.randn(num_experts, outputs, generator=generator).to(DEVICE, dtype)
    given = bias if draw.random() < 0.5 else None
    weight: Any
    if isinstance(kind, str):
        shape = (num_experts, outputs, inputs)
        weight = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        wide = weight.double()
        if kind == "transposed":
            weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        bits, group, has_offsets = kind
        sizes = num_experts * outputs, inputs
        weight = random_weight(bits, group, *sizes, seed, DEVICE, has_offsets=has_offsets)
        wide = weight.dequantized().double().view(num_experts, outputs, inputs)
    product = GroupedProduct(weight, num_experts, given)
    for num_rows in (3, draw.choice([90, 200])):
        x = torch.randn(num_rows, inputs, generator=generator).to(DEVICE, dtype)
        experts = torch.randint(0, num_experts - 1, (num_rows, top_k), generator=generator)
        experts = experts.to(DEVICE, torch.int32)
        with poisoned_memory():
            found = product(x, Groups.of(experts, num_experts))
        its = experts.flatten().long()
        exact = torch.einsum("poi,pi->po", wide[its], x.double().repeat_interleave(top_k, 0))
        exact = exact if given is None else exact + given[its].double()
        assert found.dtype == dtype
        assert off_by(found, exact) < (1e-5 if dtype == torch.float32 else 0.02)
        if num_rows == 3:
            alone = product(x[1:2], Groups.of(experts[1:2], num_experts))
            assert torch.equal(alone, found[top_k : 2 * top_k])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("family", [*MIXTURES, "nemotron_h"])
@torch.inference_mode()
def test_each_familys_experts(family: str, bits: int | None, seed: int) -> None:
    """Whatever its router and its activation, and however its weights lie."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 32}
    model: Any = make_model(family, seed, **sizes)
    if bits is not None:
        quantize_model(model, bits, 32)
    model.requires_grad_(False).to(DEVICE)
    mlp = mixture_of(model)
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    wanted = mlp(x)
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted)[0]
    with poisoned_memory():
        found = fused_mlp(ExpertParts.of(mlp))(x[0])
    assert_near(found, wanted)


@torch.inference_mode()
def test_quantized_experts_are_joined_once(seed: int) -> None:
    """Before free memory is measured. The model can still compute."""
    model: Any = make_model("qwen2_moe", seed, moe_intermediate_size=32)
    quantize_model(model, 4, 32)
    model.requires_grad_(False).to(DEVICE)
    experts = model.model.layers[-1].mlp.experts.quantized
    weights = [weight for expert in experts for weight in expert]
    expected = [weight.dequantized() for weight in weights]
    FusedDecoder.arrange(model)
    places = [weight.numbers.data_ptr() for weight in weights]
    FusedDecoder.arrange(model)
    assert [weight.numbers.data_ptr() for weight in weights] == places
    assert len({weight.numbers.untyped_storage().data_ptr() for weight in weights}) == 2
    for weight, wanted in zip(weights, expected, strict=True):
        assert torch.equal(weight.dequantized(), wanted)
