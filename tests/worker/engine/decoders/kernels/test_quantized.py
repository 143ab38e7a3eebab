"""Weights and K and V of few bits on a GPU: in Triton's interpreter, or with TRITON_INTERPRET=0 on
a GPU."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

from benchmarks.gpu.cases import off_by, poisoned_memory, random_weight
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.attention.triton_kernels.paged import TritonPaged
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.decoders.kernels.fp8_product import FP8Product
from promptq.worker.engine.decoders.kernels.fused import FusedDecoder
from promptq.worker.engine.decoders.kernels.linear import fused
from promptq.worker.engine.decoders.kernels.quantized_product import FEW_ROWS, QuantizedProduct
from promptq.worker.engine.load_check import comparison, formula
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, load_model
from promptq.worker.engine.quantization.fp8_weight import FP8Weight
from promptq.worker.engine.quantization.modules import (
    QuantizedLinear,
    move_quantized,
    quantize_model,
)
from promptq.worker.engine.runner import load_runner, warm_up
from promptq.worker.engine.runner.load_runner import runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.engine.runner.quantizing import check_quantization
from tests.worker.engine.checkpoints.test_formats import FILES, logits_of
from tests.worker.engine.checkpoints.test_formats import expected as expected_of
from tests.worker.engine.quantization.test_quantization import logprobs_of
from tests.worker.engine.tiny_models import LLAMA_SHAPED, VOCAB_SIZE, make_model

KINDS = [(8, None), (8, 16), (8, 64), (4, None), (4, 32), (4, 128)]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("has_offsets", [False, True], ids=["", "offsets"])
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_products_are_those_of_what_the_weights_stand_for(
    bits: int, group: int | None, dtype: torch.dtype, has_offsets: bool, seed: int
) -> None:
    """With few rows and with many, with odd sizes, and each row as it is alone. Long rows are
    added up by several programs, over and over."""
    draw = random.Random(seed)
    rows, outputs = draw.choice([1, 5, 17, 70, FEW_ROWS + 1]), draw.choice([8, 65, 130])
    inputs = draw.choice([32, 300, 1300])
    weight = random_weight(bits, group, outputs, inputs, seed, DEVICE, has_offsets=has_offsets)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(outputs, generator=generator).to(DEVICE, dtype)
    has_bias = draw.random() < 0.5
    product = QuantizedProduct(weight, bias if has_bias else None)
    with poisoned_memory():
        found = product(x)
    exact = x.double() @ weight.dequantized().double().T
    if has_bias:
        exact += bias.double()
    assert found.dtype == dtype
    assert off_by(found, exact) < (1e-5 if dtype == torch.float32 else 0.02)
    few = product(x[:1])
    assert off_by(few, exact[:1]) < (1e-5 if dtype == torch.float32 else 0.02)
    if rows <= FEW_ROWS:
        assert torch.equal(product(x), found)


def test_products_in_fp8(seed: int) -> None:
    """Inputs are rounded to fp8 too, each row by itself."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(48, 64, generator=generator)
    scales = plain.abs().amax(1, keepdim=True) / 448
    weight = FP8Weight((plain / scales).to(torch.float8_e4m3fn), scales).to(DEVICE)
    x = torch.randn(5, 64, generator=generator).to(DEVICE, torch.bfloat16)
    x[1] *= 1000
    x[2] = 0
    found = FP8Product(weight)(x)
    exact = x.double() @ weight.dequantized().double().T
    assert (found[2] == 0).all()
    for row in (0, 1, 3, 4):
        assert off_by(found[row : row + 1], exact[row : row + 1]) < 0.06
        alone = FP8Product(weight)(x[row : row + 1])
        torch.testing.assert_close(alone[0], found[row], rtol=0.02, atol=0.0)


def test_layers_of_several_kinds_stand_side_by_side(seed: int) -> None:
    """In GGUF files, V may have more bits than Q and K."""
    weights = [
        random_weight(4, 32, 24, 64, seed, DEVICE, has_offsets=True),
        random_weight(8, 16, 8, 64, seed + 1, DEVICE, has_offsets=False),
    ]
    layers = [QuantizedLinear(weight, None, torch.float32) for weight in weights]
    plain = torch.nn.Linear(64, 5, bias=False, device=DEVICE).requires_grad_(False)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    found = fused(*layers, plain)(x)
    exact = torch.cat([*(layer(x) for layer in layers), plain(x)], 1)
    assert off_by(found, exact.double()) < 1e-5


def test_weights_of_one_kind_are_joined_once(seed: int) -> None:
    layers = [
        QuantizedLinear(
            random_weight(4, 32, 24, 64, seed + each, DEVICE, has_offsets=True), None, torch.float32
        )
        for each in range(3)
    ]
    expected = [layer.quantized.dequantized() for layer in layers]
    fused(*layers)
    places = [layer.quantized.numbers.data_ptr() for layer in layers]
    fused(*layers)
    assert [layer.quantized.numbers.data_ptr() for layer in layers] == places
    for layer, wanted in zip(layers, expected, strict=True):
        assert torch.equal(layer.quantized.dequantized(), wanted)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the place of a card. Check and warm-up have few rows: the interpreter is slow."""
    monkeypatch.setattr(comparison, "LENGTHS", (9, 5))
    monkeypatch.setattr(warm_up, "PROMPT_TOKENS", 3)
    monkeypatch.setattr(load_runner, "backends_on", lambda *_: [TritonPaged()])
    monkeypatch.setattr(load_runner, "own_decoders", lambda *_: ([FusedDecoder], ""))


def greedy(runner: ModelRunner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    engine = LLMEngine(runner, max_num_seqs=2, max_num_batched_tokens=8)
    found: dict[int, list[int]] = {each: [] for each in range(len(prompts))}
    params = SamplingParams(temperature=0.0)
    for each, prompt in enumerate(prompts):
        engine.add(EngineRequest(each, prompt, params, seed=0, max_tokens=num_tokens))
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.sequence_id] += output.token_ids
    return [*found.values()]


@pytest.mark.parametrize(("quantization", "family"), [("int8", "qwen2"), ("int4", "qwen3")])
@pytest.mark.usefixtures("on_card")
def test_a_runner_rounds_weights(quantization: Any, family: str) -> None:
    """Its tokens are those of the library's model with the rounded weights."""
    overrides = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    sizes = {**LLAMA_SHAPED, **overrides, "head_dim": 16, "tie_word_embeddings": True}
    model = make_model(family, 7, **sizes)
    model.requires_grad_(False).to(DEVICE)
    options = LoadOptions(
        block_size=4, kv_cache_memory=50_000, max_model_len=8, quantization=quantization
    )
    runner = runner_of(LoadedModel("tiny", model, frozenset()), options)
    assert runner.why_no_own_code == ""
    assert isinstance(model.get_output_embeddings(), QuantizedLinear)
    prompts = [[5, 9, 11], [40, 3]]
    found = greedy(runner, prompts, 3)
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in tokens:
            assert int(logits_of(model, torch.tensor(ids, device=DEVICE))[-1].argmax()) == token
            ids.append(token)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["gptq", "awq", "large-q4_k_m.gguf", "ct-fp8", "ct-w8a8"])
@pytest.mark.usefixtures("on_card")
def test_a_runner_takes_quantized_checkpoints(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ids, _ = expected_of(name)
    loaded = load_model(str(FILES / name), device=DEVICE, dtype="bfloat16", decoder=FusedDecoder)
    kinds = {type(it) for it in loaded.model.modules() if isinstance(it, torch.nn.Linear)}
    assert QuantizedLinear in kinds  # nothing was widened
    before = logits_of(loaded.model, ids.to(DEVICE))
    options = LoadOptions(block_size=4, kv_cache_memory=3_000_000, max_model_len=16)
    runner = runner_of(loaded, options)
    assert runner.why_no_own_code == ""
    assert "take the memory" not in caplog.text
    (found,) = greedy(runner, [ids.tolist()], 1)
    likeliest = before[-1].topk(3)
    assert found[0] in likeliest.indices.tolist()


@pytest.mark.long
@pytest.mark.usefixtures("on_card")
def test_weights_in_fp8_pass_where_no_memory_is_left_for_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formula, "in_float32", lambda *_, **__: nullcontext(False))
    model = make_model("qwen3", 7, num_hidden_layers=4).bfloat16().requires_grad_(False)
    weights: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            wide = module.weight.float()
            scales = wide.abs().amax(1, keepdim=True) / 448
            weights[name] = FP8Weight((wide / scales).to(torch.float8_e4m3fn), scales)
    quantize_model(model, saved=weights)
    model.to(DEVICE)
    move_quantized(model, DEVICE)
    options = LoadOptions(block_size=4, kv_cache_memory=100_000, max_model_len=16)
    runner = runner_of(LoadedModel("tiny", model, frozenset(), "fp8"), options)
    assert runner.why_no_own_code == ""


@pytest.mark.usefixtures("on_card")
def test_a_cache_in_fp8_holds_twice_the_tokens(seed: int) -> None:
    found, tokens = {}, {}
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, VOCAB_SIZE, (20,), generator=generator).tolist()
    dtypes: list[Literal["auto", "fp8"]] = ["auto", "fp8"]
    for dtype in dtypes:
        model = make_model("qwen3", 7, num_hidden_layers=1).bfloat16()
        model.requires_grad_(False).to(DEVICE)
        options = LoadOptions(
            block_size=4, kv_cache_memory=20_000, max_model_len=32, kv_cache_dtype=dtype
        )
        runner = runner_of(LoadedModel("tiny", model, frozenset()), options)
        tokens[dtype] = runner.kv_layout.num_blocks
        found[dtype] = torch.tensor(logprobs_of(runner, prompt[:1], prompt[1:]))
    assert tokens["fp8"] == 2 * tokens["auto"]
    off = (found["fp8"] - found["auto"]).abs().mean() / found["auto"].std()
    print(f"off by {off:.3f} of the spread")
    assert 0 < off < 0.15


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("fp8", "cpu", "fp8 does not work on cpu; use int8"),
        ("int8", "cuda:0", "int8 does not work on cuda:0; use fp8"),
    ],
)
def test_each_device_has_its_kind_of_cache(asked: Any, device: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        check_quantization(LoadOptions(kv_cache_dtype=asked), torch.device(device))


def test_old_cards_have_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ConfigurationError, match=r"8\.9 or higher, and cuda:0 has 8\.0"):
        check_quantization(LoadOptions(kv_cache_dtype="fp8"), torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    weight = FP8Weight(torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1))
    assert not FusedDecoder.takes(weight)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert FusedDecoder.takes(weight)
