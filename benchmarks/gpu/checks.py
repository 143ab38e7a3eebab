"""Checks that the kernels, and whole models on them, compute correctly, before any measurement."""

from __future__ import annotations

import secrets
from itertools import product

import torch

from benchmarks.gpu.cases import (
    Case,
    Shape,
    off_by,
    poisoned_memory,
    random_fp8_weight,
    random_weight,
)
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.attention.types import FULL, LayerCache, Pattern, Scoring, StepLayout
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.decoders.expert_parts import Routing
from promptq.worker.engine.decoders.kernels.experts import choose_experts
from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.grouped_product import GroupedProduct, Groups
from promptq.worker.engine.decoders.kernels.heads import place_heads
from promptq.worker.engine.decoders.kernels.quantized_product import FEW_ROWS, QuantizedProduct
from promptq.worker.engine.decoders.rotation_parts import RotationTables
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.quantization.fp8_weight import HAS_FP8
from promptq.worker.engine.quantization.weight import QuantizedWeight
from promptq.worker.engine.runner.load_runner import runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from tests.worker.engine.tiny_models import NATIVE, VOCAB_SIZE, generate, make_model

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
STEPS = [
    [(1900, 1), (1000, 1), (333, 1), (17, 1), (1, 1)],
    [(700, 700), (2, 2), (1025, 130), (64, 5)],
    [(800, 1), (9, 1), (300, 300), (519, 6), (1232, 400)],
]
SHAPES = [
    Shape(12, 2, 64, 64),
    Shape(6, 6, 192, 128),
    Shape(4, 1, 256, 256),
    Shape(14, 2, 80, 72),
]
WINDOW, CHUNK = Pattern("sliding", 128), Pattern("chunked", 96)
CASES: list[tuple[torch.dtype, Shape, Pattern, float | None]] = [
    # Each combination is compiled anew, so not all of them are tried.
    (FP8, Shape(32, 8, 128, 128), FULL, None),
    (FP8, SHAPES[0], WINDOW, 20.0),
    *(
        (torch.bfloat16, Shape(32, 8, 128, 128), pattern, softcap)
        for pattern in (FULL, WINDOW, CHUNK)
        for softcap in (None, 20.0)
    ),
    *((torch.bfloat16, shape, FULL, None) for shape in SHAPES),
    *((torch.bfloat16, shape, WINDOW, 20.0) for shape in SHAPES),
    *((dtype, SHAPES[0], FULL, None) for dtype in (torch.float32, torch.float16)),
    *((dtype, SHAPES[3], CHUNK, 20.0) for dtype in (torch.float32, torch.float16)),
]
"""Cases with a softcap also have sinks. In cases with FP8, K and V are in fp8 and queries in
bf16."""
TINY_STEPS = [[(70, 1), (1, 1)], [(40, 1), (20, 20), (30, 6)]]
TINY_CASES = [
    (dtype, Shape(6, 2, 16, 12), pattern, softcap)
    for dtype, (pattern, softcap) in zip(
        (*TOLERANCE, FP8), 2 * [(FULL, None), (WINDOW, 20.0)], strict=True
    )
]
PRODUCTS = [(8, None, False), (8, 32, True), (4, 32, False), (4, 128, True)]
"""Bits, group size, and whether there are offsets."""
FAMILIES = [
    *("qwen3", "mistral", "gemma2", "gemma3_text", "olmo3", "cohere2", "nemotron", "granite"),
    *("hunyuan_v1_dense", "gpt_oss", "qwen2_moe", "glm4_moe", "phimoe", "deepseek_v3"),
]
"""Families, each with a layer part that the others do not have."""
TINY_FAMILIES = ["qwen3", "gpt_oss"]
EXPERTS = [None, *PRODUCTS]
"""Formats of the weights of experts. None: bf16."""


def check_kernels(device: torch.device, *, tiny: bool) -> str:
    """Check attention in all cases. Returns a summary. Raises AssertionError that names all wrong
    cases and the seed."""
    seed, worst = secrets.randbelow(1 << 31), 0.0
    cases = TINY_CASES if tiny else CASES
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < HAS_FP8:
        cases = [case for case in cases if case[0] != FP8]
    wrong: list[str] = []
    for kept, shape, pattern, softcap in cases:
        dtype = torch.bfloat16 if kept == FP8 else kept
        for step in TINY_STEPS if tiny else STEPS:
            what = f"{kept} {shape} {step} {pattern} softcap {softcap}"
            case = Case(step, shape, dtype=dtype, kept=kept, device=device, seed=seed)
            sinks = None if softcap is None else case.sinks
            scoring = Scoring(shape.key_size**-0.5, pattern, softcap, sinks)
            try:
                output = case.attend(TritonPaged(), scoring)
            except Exception as error:  # the compiler's, of one variant: see how the others fare
                wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
                continue
            off = off_by(output, case.expected(scoring))
            if not off < TOLERANCE[dtype]:
                wrong.append(f"{what}: off by {off:.2g}")
            elif not case.untouched():
                wrong.append(f"{what}: wrote elsewhere in the cache")
            worst = max(worst, off / TOLERANCE[dtype])
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} wrong, seed {seed}", *wrong]))
    return f"{len(cases)} cases against fp64, seed {seed}; worst at {worst:.0%} of its tolerance"


def check_products(device: torch.device, *, tiny: bool) -> str:
    """Check products with weights of few bits. Returns a summary. Raises AssertionError that names
    all wrong cases."""
    seed, worst = secrets.randbelow(1 << 31), 0.0
    generator = torch.Generator().manual_seed(seed)
    wrong: list[str] = []
    # Several programs for each tile, one, and none but the last tiles.
    shapes = [(66, 300)] if tiny else [(6144, 4096), (60_000, 256), (130, 600)]
    for (outputs, inputs), (bits, group, has_offsets) in product(shapes, PRODUCTS):
        weight = random_weight(bits, group, outputs, inputs, seed, device, has_offsets=has_offsets)
        bias = torch.randn(outputs, generator=generator).to(device, torch.bfloat16)
        linear, wide = QuantizedProduct(weight, bias), weight.dequantized().double()
        for num_rows in (1, 20, 100, FEW_ROWS + 1):
            what = f"{outputs} x {inputs}, {bits} bits, group {group}, offsets {has_offsets},"
            what += f" {num_rows} rows"
            rows = torch.randn(num_rows, inputs, generator=generator).to(device, torch.bfloat16)
            try:
                with poisoned_memory():
                    first, again = linear(rows), linear(rows)
            except Exception as error:  # the compiler's, of one variant: see how the others fare
                wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
                continue
            off = off_by(first, rows.double() @ wide.T + bias.double())
            if not off < TOLERANCE[torch.bfloat16]:
                wrong.append(f"{what}: off by {off:.2g}")
            elif not torch.equal(first, again):
                wrong.append(f"{what}: another result the second time")
            worst = max(worst, off / TOLERANCE[torch.bfloat16])
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} wrong, seed {seed}", *wrong]))
    return f"{len(PRODUCTS)} formats against fp64, seed {seed}; worst at {worst:.0%}" + (
        f" of its tolerance; {_check_fp8(device, seed)}"
    )


def check_experts(device: torch.device, *, tiny: bool) -> str:
    """Check the choice of experts, and products with the experts' weights for few and for many
    rows. Returns a summary. Raises AssertionError that names all wrong cases."""
    seed, worst = secrets.randbelow(1 << 31), 0.0
    generator = torch.Generator().manual_seed(seed)
    wrong: list[str] = []
    (num_experts, top_k), (outputs, inputs) = (8, 2), (66, 300)
    if not tiny:
        (num_experts, top_k), (outputs, inputs) = (64, 8), (1536, 2048)
    for routing in (
        Routing(num_experts, top_k, normalizes=True),
        Routing(num_experts, top_k, "sigmoid", num_groups=4, top_groups=2, scale=2.5),
        Routing(num_experts, 2, "sparsemixer", jitter=0.1),
    ):
        logits = torch.randn(50, num_experts, generator=generator).to(device)
        experts, shares = choose_experts(routing, logits)
        found = torch.zeros_like(logits).scatter(1, experts.long(), shares)
        if not torch.allclose(found, routing.shares(logits), rtol=1e-3, atol=1e-5):
            wrong.append(f"{routing}: other shares")
    for wanted in EXPERTS:
        weight: torch.Tensor | QuantizedWeight
        if wanted is None:
            weight = torch.randn(num_experts, outputs, inputs, generator=generator)
            weight = weight.to(device, torch.bfloat16)
            wide = weight.double()
        else:
            bits, group, has_offsets = wanted
            sizes = num_experts * outputs, inputs
            weight = random_weight(bits, group, *sizes, seed, device, has_offsets=has_offsets)
            wide = weight.dequantized().double().view(num_experts, outputs, inputs)
        linear = GroupedProduct(weight, num_experts)
        for num_rows in (1, 20) if tiny else (1, 64, 500, 3000):  # a variant for each
            what = f"{num_experts} experts of {outputs} x {inputs}, {wanted}, {num_rows} rows"
            rows = torch.randn(num_rows, inputs, generator=generator).to(device, torch.bfloat16)
            chosen = torch.rand(num_rows, num_experts, generator=generator).topk(top_k).indices
            chosen = chosen.to(device)
            try:
                with poisoned_memory():
                    groups = Groups.of(chosen.int(), num_experts)
                    found = linear(rows, groups).view(num_rows, top_k, outputs)
            except Exception as error:  # the compiler's, of one variant: see how the others fare
                wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
                continue
            exact = torch.zeros(found.shape, dtype=torch.float64, device=device)
            for expert in range(num_experts):
                row, slot = (chosen == expert).nonzero(as_tuple=True)
                exact[row, slot] = rows[row].double() @ wide[expert].T
            off = off_by(found, exact)
            if not off < TOLERANCE[torch.bfloat16]:
                wrong.append(f"{what}: off by {off:.2g}")
            worst = max(worst, off / TOLERANCE[torch.bfloat16])
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} wrong, seed {seed}", *wrong]))
    return f"{len(EXPERTS)} formats against fp64, seed {seed}; worst at {worst:.0%}"


def _check_fp8(device: torch.device, seed: int) -> str:
    weight = random_fp8_weight(96, 640, seed, device)
    if not FP8Product.takes(weight):
        return "no fp8 on this card"
    rows = torch.randn(70, 640, generator=torch.Generator().manual_seed(seed))
    rows = rows.to(device, torch.bfloat16)
    scales = rows.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
    exact = (rows / scales).to(torch.float8_e4m3fn).double() * scales
    off = off_by(FP8Product(weight)(rows), exact @ weight.dequantized().double().T)
    if not off < TOLERANCE[torch.bfloat16]:
        raise AssertionError(f"fp8: off by {off:.2g}, seed {seed}")
    _check_fp8_heads(device, seed)
    return f"fp8 off by {off:.2g}"


def _check_fp8_heads(device: torch.device, seed: int) -> None:
    """Checks that K and V written in fp8 are the rounded K and V written in bf16."""
    num_rows, num_kv_heads, size = 3, 2, 64
    qkv = torch.randn(
        num_rows, 4 * num_kv_heads * size, generator=torch.Generator().manual_seed(seed)
    )
    qkv = (300 * qkv).to(device, torch.bfloat16)  # some of it is beyond what fp8 has
    places = torch.arange(num_rows, device=device)
    layout = StepLayout(0, [], [], places.unsqueeze(1), places, places, 16)
    angles = torch.rand(num_rows, size // 2, device=device)
    tables = RotationTables(angles.cos().bfloat16(), angles.sin().bfloat16(), is_interleaved=False)
    shape = (num_rows, num_kv_heads, 16, size)
    wide, narrow = (
        LayerCache(*(torch.zeros(shape, device=device).to(dtype) for _ in range(2)))
        for dtype in (torch.bfloat16, FP8)
    )
    for cache in (wide, narrow):
        place_heads(qkv, places, tables, None, cache, layout)
    for kept, exact in ((narrow.key, wide.key), (narrow.value, wide.value)):
        rounded = exact.float().clamp(-448, 448).to(FP8).float()
        is_compared = exact.abs() >= 2.0**-6  # Triton's interpreter cuts smaller ones off
        if device.type == "cuda":
            is_compared = torch.ones_like(is_compared)
        if not torch.equal(kept.float()[is_compared], rounded[is_compared]):
            raise AssertionError(f"fp8: K or V are rounded in another way, seed {seed}")


def check_models(device: torch.device, *, tiny: bool) -> str:
    """Check whole models in fp32: requests that join a batch must get the greedy tokens of
    `generate`. Returns a summary. Raises AssertionError."""
    seed = secrets.randbelow(1 << 31)
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (1, 13, 30, 6, 21, 45)
    ]
    families, num_tokens = (TINY_FAMILIES, 5) if tiny else (FAMILIES, 16)
    wrong: list[str] = []
    for family in families:
        model = make_model(family, seed=7)
        expected = [generate(model, prompt, num_tokens) for prompt in prompts]
        model.requires_grad_(False).to(device)
        try:
            runner = _runner(LoadedModel(family, model, frozenset()))
            outputs = _outputs(runner, prompts, num_tokens)
        except Exception as error:
            wrong.append(f"{family}: {type(error).__name__}: {str(error)[:400]}")
            continue
        if outputs != expected:
            wrong.append(f"{family}: {outputs} instead of {expected}")
        if device.type == "cuda" and family in NATIVE and runner.why_no_own_code:
            wrong.append(f"{family}: without fused kernels, {runner.why_no_own_code}")
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} wrong, seed {seed}", *wrong]))
    return f"{len(families)} families, {len(prompts)} requests each, seed {seed}: as `generate`"


def _runner(loaded: LoadedModel) -> ModelRunner:
    options = LoadOptions(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, block_size=4)
    return runner_of(loaded, options)


def _outputs(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=24)
    return run(engine, prompts, num_tokens)


GREEDY = SamplingParams(temperature=0.0)


def run(
    engine: LLMEngine,
    prompts: list[list[int]],
    num_tokens: int,
    params: SamplingParams = GREEDY,
) -> list[list[int]]:
    """Add all requests at once, and return their outputs, which have `num_tokens` tokens each."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(index, prompt, params, seed=0, max_tokens=num_tokens, order=(index, ""))
        )
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.sequence_id] += output.token_ids
    return outputs
