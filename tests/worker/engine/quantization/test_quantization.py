"""Weights in int8 and int4: how close they are, which models they serve, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.decoders.native import NativeDecoder
from promptq.worker.engine.decoders.native_tensors import native_weight
from promptq.worker.engine.device.precision import in_float32
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, load_model
from promptq.worker.engine.native import library
from promptq.worker.engine.native.library import NativeError
from promptq.worker.engine.quantization import modules
from promptq.worker.engine.quantization.modules import (
    QuantizedLinear,
    quantize_model,
    with_plain_modules,
)
from promptq.worker.engine.quantization.weight import QuantizedWeight
from promptq.worker.engine.runner.load_runner import load_runner, runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from tests.worker.engine.tiny_models import (
    FAMILIES,
    LLAMA_SHAPED,
    VOCAB_SIZE,
    make_model,
    save_model,
)

SEED = 5
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32}
CPU = torch.device("cpu")


def options(quantization: str, **others: Any) -> LoadOptions:
    changed: dict[str, Any] = {"quantization": quantization, **others}
    return LoadOptions(device="cpu", block_size=4, kv_cache_memory=8_000_000, **changed)


def logprobs_of(runner: ModelRunner, prompt: list[int], tokens: list[int]) -> list[float]:
    """Of each of the tokens, which are forced."""
    engine = LLMEngine(runner, max_num_seqs=2, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    engine.add(EngineRequest(0, prompt + tokens, params, seed=0, max_tokens=1))
    found: list[float] = []
    while engine.has_work:
        for output in engine.step().outputs:
            for reported in output.prompt_logprobs or ():
                found += reported.logprobs.tolist()
    return found[-len(tokens) :]


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (4, 128)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_weights_are_rounded_to_the_nearest(
    bits: int, group: int | None, dtype: torch.dtype, seed: int
) -> None:
    """No number is further off than half a step, but those that 4 bits cut off."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(33, 300, generator=generator).to(dtype)
    weight[3] = 0.0
    weight[4, :32] *= 1e-4
    quantized = QuantizedWeight.of(weight, bits, group)
    assert quantized.shape == (33, 300)
    steps = quantized.scales.abs().repeat_interleave(quantized.group, dim=1)[:, :300]
    off = (quantized.dequantized() - weight.float()).abs()
    assert (off[3] == 0).all()
    within = off <= 0.5001 * steps
    if bits == 8:
        assert within.all()
    else:  # what is cut off is at the ends of the range
        ends = (
            quantized.dequantized()
            / quantized.scales.repeat_interleave(quantized.group, 1)[:, :300]
        )
        assert torch.isin(ends[~within].round(), torch.tensor([-8.0, 7.0])).all()
        assert within.float().mean() > 0.95
    rows = torch.tensor([7, 4])
    assert torch.equal(quantized.rows(rows).dequantized(), quantized.dequantized()[rows])


def test_four_bits_are_closer_than_by_the_largest_number_alone(seed: int) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))
    chosen = QuantizedWeight.of(weight, 4, 32).dequantized()
    groups = weight.unflatten(1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / step).round().clamp(-8, 7) * step).flatten(1)
    assert (chosen - weight).norm() < 0.95 * (plain - weight).norm()


def test_a_weight_that_is_not_finite_is_refused() -> None:
    weight = torch.ones(4, 64)
    weight[2, 5] = float("nan")
    with pytest.raises(NativeError, match="not finite"):
        QuantizedWeight.of(weight, 8)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "minicpm3"]
)
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.2), ("int4", 1.0)])
def test_log_probabilities_are_near_those_of_the_whole_numbers(
    family: str, quantization: str, most: float, tmp_path: Path, seed: int
) -> None:
    """Relative to their spread. They are nearer to the library's model with the rounded weights."""
    sizes = {**FAMILIES.get(family, LLAMA_SHAPED), **SHAPE, "initializer_range": 0.1}
    directory = save_model(tmp_path, family, SEED, **sizes)
    runner = load_runner(str(directory), options(quantization, dtype="float32"))
    assert runner.why_no_own_code == ""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (60,), generator=generator).tolist()
    found = torch.tensor(logprobs_of(runner, ids[:20], ids[20:]))

    loaded = load_model(str(directory), device=CPU, dtype="float32")

    def expected() -> torch.Tensor:
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([ids])).logits[0]
        of_next = logits.log_softmax(-1)[19:-1]
        return of_next.gather(1, torch.tensor(ids[20:]).unsqueeze(1))[:, 0]

    def off() -> float:
        return float((found - expected()).abs().mean() / expected().std())

    off_whole = off()
    bits, group = (8, None) if quantization == "int8" else (4, 32)
    quantize_model(loaded.model, bits, group, embeddings=True)
    off_rounded = off()
    print(f"{off_whole:.4f} of the whole numbers, {off_rounded:.4f} of the rounded ones")
    assert off_whole < most
    assert off_rounded < 0.1
    if quantization == "int4":
        assert off_rounded < off_whole / 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embeddings", [True, False])
def test_the_embedding_and_the_head_are_rounded_if_asked(
    tied: bool, embeddings: bool, tmp_path: Path
) -> None:
    directory = save_model(tmp_path, "qwen3", SEED, **SHAPE, tie_word_embeddings=tied)
    loaded = load_model(str(directory), device=CPU)
    runner = runner_of(loaded, options("int4", quantize_embeddings=embeddings))
    assert runner.why_no_own_code == ""
    kinds = {type(module) for module in loaded.model.modules()}
    assert (modules.QuantizedEmbedding in kinds) == embeddings
    assert isinstance(loaded.model.get_output_embeddings(), QuantizedLinear) == embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_a_rounded_embedding_keeps_its_scale(dtype: torch.dtype, seed: int) -> None:
    """Gemma's embeddings have a scale: quantized, widened again, and in fp32 for the check."""
    model: Any = make_model("gemma3_text", seed).to(dtype)
    ids = torch.arange(3, VOCAB_SIZE)
    wanted = model.get_input_embeddings()(ids)
    further: Any = make_model("gemma4_text", seed).to(dtype)
    inputs = further.model.get_per_layer_inputs(ids)
    quantize_model(further, 8, embeddings=True)
    assert isinstance(further.model.embed_tokens_per_layer, modules.QuantizedEmbedding)
    assert (further.model.get_per_layer_inputs(ids) - inputs).norm() < 0.02 * inputs.norm()

    def off_by() -> float:
        found = model.get_input_embeddings()(ids)
        assert found.dtype == wanted.dtype
        return float((found.float() - wanted.float()).norm() / wanted.float().norm())

    quantize_model(model, 8, embeddings=True)
    assert off_by() < 0.02
    with_plain_modules(model)
    assert off_by() < 0.02
    with in_float32(model, by_parts=True):
        found = model.get_input_embeddings()(ids)
    assert found.dtype == torch.float32
    assert float((found - wanted.float()).norm() / wanted.float().norm()) < 0.02


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3", {"head_dim": 64}), ("minicpm3", {"kv_lora_rank": 64, "qk_rope_head_dim": 32})],
)
def test_a_cache_in_int8_holds_nearly_twice_the_tokens(
    family: str, sizes: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """Prompts that share a prefix share it there too, and log-probabilities hardly change."""
    directory = str(save_model(tmp_path, family, SEED, **{**SHAPE, **sizes}))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (60,), generator=generator).tolist()
    found, tokens = {}, {}
    for dtype in ("auto", "int8"):
        runner = load_runner(directory, options("none", dtype="bfloat16", kv_cache_dtype=dtype))
        assert runner.why_no_own_code == ""
        assert runner.is_row_invariant
        layout = runner.kv_layout
        tokens[dtype] = layout.num_blocks * layout.block_size
        found[dtype] = torch.tensor(logprobs_of(runner, ids[:20], ids[20:]))
        engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=256)
        params = SamplingParams(temperature=0.0)
        for index in range(3):
            engine.add(EngineRequest(index, [*ids, 5 + index], params, seed=0, max_tokens=4))
            while engine.has_work:
                engine.step()
        assert engine.stats.cached_tokens >= 2 * 56
    assert 1.9 < tokens["int8"] / tokens["auto"] < 2
    off = (found["int8"] - found["auto"]).abs().mean() / found["auto"].std()
    print(f"off by {off:.4f} of their spread")
    assert 0 < off < 0.05


@pytest.mark.parametrize("others", [{}, {"quantization": "int4"}])
def test_a_cache_in_int8_needs_native_code(others: dict[str, Any]) -> None:
    loaded = LoadedModel("gpt2", make_model("gpt2", SEED), frozenset())
    asked = options(**{"quantization": "none", "kv_cache_dtype": "int8", **others})
    with pytest.raises(
        UnsupportedModelError, match=r"gpt2: .*--kv-cache-dtype int8 needs promptq's code"
    ):
        runner_of(loaded, asked)


def test_a_model_stays_on_its_device_and_in_its_dtype() -> None:
    """Its first parameter tells where it is, and may be that of an embedding."""
    place = torch.device("meta")
    weight = QuantizedWeight.of(torch.ones(4, 32), 4, 32).to(place)
    linear = QuantizedLinear(weight, None, torch.bfloat16)
    for module in (linear, modules.QuantizedEmbedding(weight, torch.bfloat16)):
        assert (module.weight.device, module.weight.dtype) == (place, torch.bfloat16)
    assert weight.scales.dtype == torch.float16  # as a card keeps them


def test_what_was_rounded_and_copied_is_freed(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(tmp_path, "llama", SEED, **SHAPE)), device=CPU)
    runner_of(loaded, options("int8"))
    linears = [it for it in loaded.model.modules() if isinstance(it, nn.Linear)]
    assert len(linears) == 2 * 7 + 1
    for linear in linears:
        assert isinstance(linear, QuantizedLinear)
        assert linear.weight.numel() == linear.quantized.numbers.numel() == 0


def test_a_decoder_that_computes_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = NativeDecoder._weight
    others = []

    def other_weight(self: NativeDecoder, module: Any, **options: bool) -> Any:
        if self._is_packed and isinstance(module, QuantizedLinear):
            scales = cast("QuantizedWeight", module.quantized).scales.flip(0)
            others.append(replace(cast("QuantizedWeight", module.quantized), scales=scales))
            return native_weight(others[-1])
        return plain(self, module, **options)

    monkeypatch.setattr(NativeDecoder, "_weight", other_weight)
    directory = save_model(tmp_path, "llama", SEED, **SHAPE)
    with pytest.raises(UnsupportedModelError, match=r"--quantization int8 changes logits by"):
        load_runner(str(directory), options("int8"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_are_wrong_on_a_processor_are_found_out(
    dtype: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = NativeDecoder._weight
    others = []

    def other_weight(self: NativeDecoder, module: Any, **options: bool) -> Any:
        if self._is_packed and not options:
            others.append(module.weight.flip(0))
            return library.Weight(numbers=others[-1].data_ptr(), bits=8 * module.weight.itemsize)
        return plain(self, module, **options)

    monkeypatch.setattr(NativeDecoder, "_weight", other_weight)
    directory = save_model(tmp_path, "llama", SEED, **SHAPE)
    with pytest.raises(UnsupportedModelError, match=r"llama: the products of native code change"):
        load_runner(str(directory), options("none", dtype=dtype))


@pytest.mark.parametrize("family", ["gpt2", "llama4_text"])
def test_other_families_are_refused_by_name(family: str) -> None:
    loaded = LoadedModel(family, make_model(family, SEED), frozenset())
    with pytest.raises(
        UnsupportedModelError, match=f"{family}: --quantization int8 needs promptq's code"
    ):
        runner_of(loaded, options("int8"))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"quantization": "int3"}, "'int3' is not one of none, int8, int4"),
        ({"native": False}, "needs promptq's code; omit --no-native"),
        ({"attention": "torch"}, "--attention torch was requested"),
        ({"dtype": "float16"}, "the weights are torch.float16"),
    ],
)
def test_what_rules_a_quantization_out_is_named(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    directory = save_model(tmp_path, "llama", SEED, **SHAPE)
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=named):
        load_runner(str(directory), options(**{"quantization": "int8", **changed}))
