"""The native decoder computes what the library's modules compute, and only where it does."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.decoders.native_tensors import native_weight
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions
from promptq.worker.engine.native import build
from promptq.worker.engine.native.build import NativeCodeError, library_path
from promptq.worker.engine.native.library import NativeError, Weight, load_native
from promptq.worker.engine.quantization.weight import QuantizedWeight
from promptq.worker.engine.runner.load_runner import load_runner, runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from tests.worker.engine.tiny_models import (
    FAMILIES,
    NATIVE,
    VOCAB_SIZE,
    generate,
    make_model,
    save_model,
)

SEED = 11
SHAPES = [
    # (query heads, KV heads, size of a head)
    (4, 4, 8),
    (6, 2, 24),
    (5, 1, 40),
    (8, 2, 64),
    (4, 2, 128),
    (12, 2, 16),
]


def load(directory: Path, **options: Any) -> ModelRunner:
    return load_runner(
        str(directory),
        LoadOptions(device="cpu", block_size=4, kv_cache_memory=8_000_000, **options),
    )


def outputs_of(runner: ModelRunner, num_requests: int = 6) -> list[list[int]]:
    """Greedy tokens of random prompts that share steps, in chunks of at most 9."""
    engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk=9)
    generator = torch.Generator().manual_seed(SEED)
    outputs: dict[int, list[int]] = {}
    for index in range(num_requests):
        length = int(torch.randint(1, 40, (1,), generator=generator))
        prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0)
        engine.add(EngineRequest(index, prompt, params, seed=0, max_tokens=12))
        outputs[index] = []
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.sequence_id] += output.token_ids
    return [outputs[index] for index in range(num_requests)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_serves_what_is_of_the_llama_kind(family: str, tmp_path: Path) -> None:
    directory = save_model(tmp_path, family, SEED)
    native = load(directory, dtype="float32")
    assert native.why_no_own_code == ""
    modules = load(directory, dtype="float32", native=False)
    assert modules.why_no_own_code == "it is turned off"
    outputs = outputs_of(native)
    assert outputs == outputs_of(modules)
    assert len({token for tokens in outputs for token in tokens}) > 10


@pytest.mark.parametrize("native", [True, False], ids=["native", "modules"])
def test_experts_of_odd_sizes_are_served(native: bool, tmp_path: Path) -> None:
    """The library's grouped products refuse such rows."""
    shape = {"moe_intermediate_size": 21, "num_experts": 5, "num_experts_per_tok": 1}
    directory = save_model(tmp_path, "qwen3_moe", SEED, **shape)
    model: Any = make_model("qwen3_moe", SEED, **shape)
    model.set_experts_implementation("eager")
    runner = load(directory, dtype="float32", native=native)
    assert (runner.why_no_own_code == "") == native
    [tokens] = outputs_of(runner, 1)
    prompts = torch.Generator().manual_seed(SEED)
    length = int(torch.randint(1, 40, (1,), generator=prompts))
    prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=prompts).tolist()
    assert tokens == generate(model, prompt, len(tokens))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_heads_of_all_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    shape = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": 8 * num_heads,
        "attention_bias": True,
    }
    directory = save_model(tmp_path, "llama", SEED, **shape)
    native = load(directory, dtype="float32")
    assert native.why_no_own_code == ""
    assert outputs_of(native) == outputs_of(load(directory, dtype="float32", native=False))


GEMMA_4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"num_key_value_heads": 1, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0},
        {"attention_k_eq_v": False, "num_kv_shared_layers": 1},
        GEMMA_4_EXPERTS,
    ],
    ids=["no further inputs", "heads of both sizes", "keys apart from values", "experts"],
)
def test_gemma_4_in_its_variants(shape: dict[str, Any], tmp_path: Path) -> None:
    directory = save_model(tmp_path, "gemma4_text", SEED, **shape)
    native = load(directory, dtype="float32")
    assert native.why_no_own_code == ""
    assert outputs_of(native) == outputs_of(load(directory, dtype="float32", native=False))


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")],
)
@pytest.mark.parametrize(
    ("family", "head_dim", "window"),
    [
        *(("qwen3", 64, None), ("qwen3", 128, None), ("mistral", 24, 20), ("llama", 40, None)),
        *(("gemma2", 256, 20), ("olmo2", 24, None), ("cohere2", 64, 20)),
        *(("glm4_moe", 64, None), ("gpt_oss", 40, 20)),
        *(("qwen3_5_text", 64, None), ("olmo_hybrid", 40, None), ("granitemoehybrid", 64, None)),
        *(("lfm2", 64, None), ("qwen3_next", 24, None), ("gemma4_text", 64, 20)),
        *(("falcon_h1", 24, None), ("nemotron_h", 64, None)),
        *(("deepseek_v3", 64, None), ("minicpm3", 64, None), ("kimi_linear", 24, None)),
    ],
)
@pytest.mark.usefixtures("costless")
def test_a_row_does_not_depend_on_the_rows_beside_it(
    family: str, head_dim: int, window: int | None, dtype: str, quantization: str, tmp_path: Path
) -> None:
    """To the last bit: alone or in company, whole or in chunks, cached, drafted or neither."""
    shape = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "hidden_size": 256,
        "intermediate_size": 1536,
        "sliding_window": window,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim + 8,
        "linear_head_dim": head_dim,
        "kv_lora_rank": 4 * head_dim,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_d_ssm": 512,
    }
    if "kv_lora_rank" in FAMILIES.get(family, {}):
        shape |= {"num_key_value_heads": 8, "qk_rope_head_dim": head_dim}
    directory = save_model(tmp_path, family, SEED, **shape)
    runner = load(directory, dtype=dtype, quantization=quantization, max_num_seqs=8)
    assert runner.why_no_own_code == ""
    assert runner.is_row_invariant
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(1, 80, (6,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    prompts += [prompt + prompts[1] for prompt in prompts[:3]]

    def run(together: int, **options: int) -> list[tuple[list[int], list[float]]]:
        engine = LLMEngine(runner, max_num_seqs=8, **options)
        results = [(list[int](), list[float]()) for _ in prompts]
        free = SamplingParams(temperature=0.0, logprobs=0)
        repetitive = free.model_copy(update={"logit_bias": {"5": 100.0, "6": 99.9}})
        for index, prompt in enumerate(prompts):
            params = repetitive if index % 4 == 1 else free
            engine.add(EngineRequest(index, prompt, params, seed=0, max_tokens=40))
            while engine.has_work and (index % together == 0 or index == len(prompts) - 1):
                for output in engine.step().outputs:
                    results[output.sequence_id][0].extend(output.token_ids)
                    results[output.sequence_id][1].extend(
                        item.logprob for item in output.logprobs or ()
                    )
        assert (engine.stats.accepted_tokens > 0) == ("speculative_tokens" in options)
        return results

    alone = run(1, max_num_batched_tokens=512)
    assert alone == run(99, max_num_batched_tokens=512)
    assert alone == run(4, max_num_batched_tokens=33, prefill_chunk=7)
    assert alone == run(2, max_num_batched_tokens=512, speculative_tokens=5)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NATIVE))
def test_other_families_go_through_their_modules(family: str) -> None:
    """Whatever has another part or another formula; the reason is at hand."""
    loaded = LoadedModel(family, make_model(family, SEED), frozenset())
    runner = runner_of(loaded, LoadOptions(block_size=4, kv_cache_memory=2_000_000, max_num_seqs=4))
    assert runner.why_no_own_code not in ("", "it is turned off")


def test_a_formula_behind_familiar_names_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are Llama's, the MLP is not: the modules serve it, and rightly."""
    forward = modeling_llama.LlamaMLP.forward

    def scaled(self: modeling_llama.LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return 1.02 * forward(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", scaled)
    loaded = LoadedModel("llama", make_model("llama", SEED), frozenset())
    runner = runner_of(loaded, LoadOptions(block_size=4, kv_cache_memory=2_000_000))
    assert "of their spread" in runner.why_no_own_code


def test_bf16_is_as_close_as_the_modules_are(tmp_path: Path) -> None:
    """Both round; neither may be much further from fp32 than the other."""
    directory = save_model(tmp_path, "qwen3", SEED)
    exact = outputs_of(load(directory, dtype="float32"))
    native = load(directory, dtype="bfloat16")
    assert native.why_no_own_code == ""
    modules = outputs_of(load(directory, dtype="bfloat16", native=False))

    def agreement(outputs: list[list[int]]) -> int:
        pairs = zip(outputs, exact, strict=True)
        return sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))

    assert agreement(outputs_of(native)) >= agreement(modules) - 12
    assert agreement(modules) > 24


SIZES = [
    # (rows, inputs, columns)
    (1, 64, 16),
    (2, 7, 1),
    (5, 33, 40),
    (6, 512, 64),
    (13, 1536, 48),
    (64, 40, 999),
    (97, 9, 33),
    (97, 64, 33),
]


def draw(generator: torch.Generator, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=generator).to(dtype)


def product(
    x: torch.Tensor, weight: Weight, columns: int, bias: torch.Tensor | None, *, in_tiles: bool
) -> torch.Tensor:
    y = torch.empty(len(x), columns, dtype=x.dtype)
    load_native().linear(
        *(x.dtype == torch.bfloat16, in_tiles, x.data_ptr(), len(x), weight),
        *(columns, x.shape[1], None if bias is None else bias.data_ptr(), y.data_ptr()),
    )
    return y


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "columns"), SIZES)
@pytest.mark.parametrize("products", ["fp32", "bf16", "tiles"])
def test_products(products: str, rows: int, inputs: int, columns: int, with_bias: bool) -> None:
    """Within the rounding of the result, and each row to the last bit as it is alone."""
    in_tiles = products == "tiles"
    if in_tiles and not load_native().has_tile_registers():
        pytest.skip("this processor has no tile registers")
    dtype = torch.float32 if products == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(SEED)
    x, weight = draw(generator, dtype, rows, inputs), draw(generator, dtype, columns, inputs)
    bias = draw(generator, dtype, columns) if with_bias else None
    given = Weight(numbers=weight.data_ptr(), bits=8 * dtype.itemsize)
    found = product(x, given, columns, bias, in_tiles=in_tiles)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    rounding = 2**-22 if products == "fp32" else 2**-8
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-5 * inputs)
    each = [product(row, given, columns, bias, in_tiles=in_tiles) for row in x.split(1)]
    assert torch.equal(torch.cat(each), found)


def as_rounded(x: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [rows, inputs] in fp64, where each chunk of a row is rounded to 8 bits, and how far off
    its numbers may be, as those between two steps may be rounded to either."""
    chunks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % chunk))
    chunks = chunks.unflatten(1, (-1, chunk))
    step = chunks.abs().amax(-1, keepdim=True) / 127
    steps = chunks / step.clamp_min(1e-30)
    is_between = (steps - steps.floor() - 0.5).abs() < 1e-4
    rounded, doubt = torch.round(steps) * step, is_between * step
    return rounded.flatten(1)[:, : x.shape[1]], doubt.flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "inputs", "columns"), SIZES)
@pytest.mark.parametrize("has_offsets", [False, True], ids=["", "offsets"])
@pytest.mark.parametrize(
    ("bits", "group", "chunk"),
    [
        *[(8, None, 512), (8, 16, 16), (8, 32, 32), (8, 128, 128), (8, 1024, 512)],
        *[(4, 32, 32), (4, 128, 32)],
    ],
)
def test_products_with_quantized_weights(
    has_offsets: bool,
    bits: int,
    group: int | None,
    chunk: int,
    rows: int,
    inputs: int,
    columns: int,
    dtype: torch.dtype,
) -> None:
    """They are exact but for the rounding of inputs and of the result; a row is as it is alone."""
    generator = torch.Generator().manual_seed(SEED)
    x, weight = draw(generator, dtype, rows, inputs), draw(generator, dtype, columns, inputs)
    x[:, 0] *= 50  # one number sets the scale of its chunk
    bias = draw(generator, dtype, columns)
    quantized = QuantizedWeight.of(weight, bits, group)
    if has_offsets:
        offsets = draw(generator, torch.float32, *quantized.scales.shape).half().float()
        quantized = replace(quantized, offsets=offsets)
    given = native_weight(quantized)
    found = product(x, given, columns, bias, in_tiles=False)
    chunk = chunk if quantized.group < inputs else (32 if bits == 4 else 512)
    (rounded, doubt), numbers = as_rounded(x, chunk), quantized.dequantized().double()
    exact = rounded @ numbers.T + bias.double()
    of_result = (2**-18 if dtype == torch.float32 else 2**-8) * exact.abs()
    assert (doubt > 0).float().mean() < 0.05
    assert ((found - exact).abs() <= of_result + 1e-6 * inputs + doubt @ numbers.abs().T).all()
    each = [product(row, given, columns, bias, in_tiles=False) for row in x.split(1)]
    assert torch.equal(torch.cat(each), found)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_stays_visible(number: float) -> None:
    """So that a request whose logits are broken is ended, also with quantized weights."""
    x, weight = torch.ones(3, 64), torch.ones(5, 64)
    x[1, 40] = number
    quantized = QuantizedWeight.of(weight, 8)
    found = product(x, native_weight(quantized), 5, None, in_tiles=False)
    assert torch.equal(found.isfinite().all(1), torch.tensor([True, False, True]))


def test_groups_of_other_sizes_are_refused() -> None:
    quantized = QuantizedWeight.of(torch.ones(5, 96), 4, 48)
    assert not quantized.has_native_products
    with pytest.raises(NativeError, match="4 bits have a multiple of 32"):
        product(torch.ones(1, 96), native_weight(quantized), 5, None, in_tiles=False)


@pytest.mark.parametrize("bits", [8, 4])
def test_each_size_of_groups_is_multiplied_or_refused(bits: int) -> None:
    for group in (8, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 768, 1024):
        quantized = QuantizedWeight.of(torch.ones(5, 2048), bits, group)
        can_multiply = quantized.has_native_products
        with nullcontext() if can_multiply else pytest.raises(NativeError, match="groups"):
            product(torch.ones(1, 2048), native_weight(quantized), 5, None, in_tiles=False)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No library came with a wheel, and none was compiled here before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_BUILT", tmp_path / "built")


@pytest.mark.usefixtures("empty_cache")
def test_without_a_compiler_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeCodeError, match="no compiler"):
        library_path()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("missing", ["sources", "a folder to write to"])
def test_without_sources_or_a_folder_the_reason_is_reported(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A read-only image, or a wheel, may lack sources or a folder for them. Then PyTorch serves."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = r"cannot be written \(Not a directory\).*XDG_CACHE_HOME"
    if missing == "sources":
        monkeypatch.setattr(build, "_SOURCES", tmp_path)
        said = "sources are missing"
    with pytest.raises(NativeCodeError, match=said):
        library_path()


@pytest.mark.usefixtures("empty_cache")
def test_another_version_of_the_compiler_compiles_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And where none is left, what one of them made is used."""
    compiler = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(compiler))

    def libraries() -> int:
        with pytest.raises(NativeCodeError, match="does not load"):
            load_native.__wrapped__()
        return len(list((tmp_path / "promptq").glob("native-*.so")))

    for version in (1, 2):
        script = f'[ "$1" = --version ] && echo {version} && exit\n'
        compiler.write_text(f'#!/bin/sh\n{script}for last; do :; done; touch "$last"\n')
        compiler.chmod(0o755)
        assert (libraries(), libraries()) == (version, version)
    compiler.unlink()
    assert libraries() == 2


@pytest.mark.usefixtures("empty_cache")
def test_code_of_the_wheel_serves_the_processors_that_it_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fastest that fits, without a compiler; no other."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done; touch "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = dict(zip(build.KINDS, build.build_for(build.KINDS, tmp_path / "built"), strict=True))
    compiler.unlink()
    for name, kind in build.KINDS.items():
        monkeypatch.setattr(build, "processor_features", lambda kind=kind: kind.features | {"sse2"})
        assert library_path() == made[name]
    monkeypatch.setattr(build, "processor_features", lambda: build.KINDS["amx"].features - {"fma"})
    with pytest.raises(NativeCodeError, match="no compiler"):
        library_path()


@pytest.mark.usefixtures("empty_cache")
def test_kinds_of_processors_share_objects_without_their_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each source is compiled once for each set of features that it and its headers name."""
    compiler, log = tmp_path / "c++", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done; touch "$last"; echo "$@" >> {log}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build.build_for(build.KINDS, tmp_path / "built")
    compiled = Counter(re.findall(r"(\w+)\.cpp", log.read_text()))
    assert compiled == {
        "quantized_linear": len(build.KINDS),
        "tiles": len(build.KINDS) - 1,  # VNNI is for integers
        **dict.fromkeys(("interface", "quantizing", "sampling"), 3),
    }
    assert log.read_text().count("-shared") == len(build.KINDS)


@pytest.mark.usefixtures("empty_cache", "logs_in_json")
def test_a_compiler_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that it compiles, which takes a minute or two, is said before."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        "#!/bin/sh\necho 'interface.cpp:1: fatal error: no such header' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeCodeError, match="fatal error: no such header"):
        library_path()
    assert not list((tmp_path / "promptq").glob("*.so"))
    assert "compiling native code" in capsys.readouterr().err
