"""Checkpoints that were quantized by the tools that people use, against what these tools say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.engine.checkpoints.gptq import GPTQ
from promptq.worker.engine.decoders.native import NativeDecoder, UnpackedDecoder
from promptq.worker.engine.load_check.comparison import off_by
from promptq.worker.engine.model.loading import LoadOptions, load_model
from promptq.worker.engine.quantization.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
)
from promptq.worker.engine.quantization.weight import QuantizedWeight
from promptq.worker.engine.runner.load_runner import load_runner, runner_of
from promptq.worker.engine.runner.model_runner import ModelRunner
from promptq.worker.serve.build import build, fits_beside_others
from promptq.worker.serve.model_identity import identify
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.engine.quantization.test_quantization import logprobs_of
from tests.worker.engine.tiny_models import save_model

FILES = Path(__file__).parent / "files"
EXPECTED = load_file(FILES / "expected.safetensors")
CPU = torch.device("cpu")

# How many of the seven layers and the embedding native code takes as they are.
IN_FEW_BITS = {
    "awq": 7,
    "ct-fp8": 0,
    "ct-fp8-block": 0,
    "ct-w4a16": 7,
    "ct-w4a16-asym": 7,
    "ct-w8a16": 7,
    "ct-w8a8": 7,
    "fp8": 0,
    "gptq": 7,
    "gptq-act-order": 0,
    "gptq-asym": 7,
    "large-q4_k_m.gguf": 8,
    "qwen3-q8_0.gguf": 8,
    "small-bf16.gguf": 0,
    "small-f16.gguf": 0,
    "small-q4_0.gguf": 8,
    "small-q5_0.gguf": 8,
    "small-q8_0.gguf": 8,
}
# Offsets, and scales that are products, are rounded to fp16.
ROUNDED = {"awq", "ct-w4a16-asym", "gptq-asym", "large-q4_k_m.gguf"}


def expected(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [12], and the logits [3, vocab_size] after the last three of them."""
    key = name.removesuffix(".gguf")
    return EXPECTED[f"{key}.ids"], EXPECTED[f"{key}.logits"]


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids.unsqueeze(0)).logits[0, -3:].float()
    return logits


def off(runner: ModelRunner, name: str) -> float:
    """How far log-probabilities of the last two tokens, as a request is told them, are from the
    tool's, relative to the spread of the logits."""
    ids, logits = expected(name)
    of_next = logits.log_softmax(-1)[:-1].gather(1, ids[-2:].unsqueeze(1))[:, 0]
    spread = logits[:-1].std(dim=1)
    relative = float(
        (
            (
                torch.tensor(logprobs_of(runner, ids[:-2].tolist(), ids[-2:].tolist())) - of_next
            ).abs()
            / spread
        ).max()
    )
    print(f"{name}: off by {relative:.2g} of the spread")
    return relative


def options(**others: Any) -> LoadOptions:
    return LoadOptions(device="cpu", block_size=4, kv_cache_memory=8_000_000, **others)


def test_every_file_is_tried() -> None:
    assert {it.name for it in FILES.iterdir() if it.is_dir() or it.suffix == ".gguf"} == {
        *IN_FEW_BITS
    }
    size = sum(file.stat().st_size for file in FILES.rglob("*") if file.is_file())
    assert size < 1_000_000


@pytest.mark.parametrize("name", IN_FEW_BITS)
def test_weights_are_those_that_the_tool_reads(name: str) -> None:
    """Wide, and in the few bits that native code multiplies."""
    ids, logits = expected(name)
    loaded = load_model(str(FILES / name), device=CPU, dtype="float32")
    most = 4e-3 if name in ROUNDED else 1e-5
    assert off_by(logits_of(loaded.model, ids), logits).max() < most
    loaded = load_model(str(FILES / name), device=CPU, dtype="float32", decoder=NativeDecoder)
    modules = [
        it for it in loaded.model.modules() if isinstance(it, QuantizedLinear | QuantizedEmbedding)
    ]
    assert len({id(it.quantized) for it in modules}) == IN_FEW_BITS[name]
    assert off_by(logits_of(loaded.model, ids), logits).max() < most


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", IN_FEW_BITS)
def test_native_code_serves_it(name: str) -> None:
    runner = load_runner(str(FILES / name), options())
    assert runner.why_no_own_code == ""
    assert runner.is_row_invariant
    assert runner.dtype == torch.bfloat16
    assert bool(runner.saved_format) == (name not in ("small-bf16.gguf", "small-f16.gguf"))
    assert off(runner, name) < 0.05


@pytest.mark.parametrize("name", ["gptq", "small-q4_0.gguf"])
def test_without_native_code_it_is_served_as_wide_numbers(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load_runner(str(FILES / name), options(native=False, dtype="float32"))
    assert off(runner, name) < 1e-4
    assert "all of the linear layers" in caplog.text
    assert "take the memory and time of float32" in caplog.text


def test_a_family_whose_weights_the_library_joins_is_served_as_wide_numbers(tmp_path: Path) -> None:
    """Of a mixture of experts, the library makes one weight of those of all experts."""
    folder, wide = (save_model(tmp_path / it, "qwen3_moe") for it in ("int8", "wide"))
    tensors = load_file(folder / "model.safetensors")
    linears = [name for name in tensors if name.endswith("_proj.weight")]
    assert any(".experts.0." in name for name in linears)
    dequantized = dict(tensors)
    for name in linears:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (dequantized[name] / scale).round().to(torch.int8)
        dequantized[name] = tensors[name] * scale
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(dequantized, wide / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    ids = torch.arange(3, 15)
    assert not load_runner(str(folder), options(dtype="float32")).why_no_own_code
    loaded = load_model(str(folder), device=CPU, dtype="float32", decoder=NativeDecoder)
    plain = load_model(str(wide), device=CPU, dtype="float32")
    assert off_by(logits_of(loaded.model, ids), logits_of(plain.model, ids)).max() < 1e-5


@pytest.mark.parametrize("name", ["gptq", "small-q4_0.gguf"])
def test_what_turns_out_not_to_be_for_native_code_is_widened(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def something_else(self: UnpackedDecoder, step: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(rows), self._vocab_size)

    monkeypatch.setattr(UnpackedDecoder, "logits", something_else)
    runner = load_runner(str(FILES / name), options(dtype="float32"))
    assert "its logits are off by" in runner.why_no_own_code
    assert off(runner, name) < 1e-4
    assert "all of the linear layers" in caplog.text


def test_what_was_not_saved_in_few_bits_can_be_rounded(caplog: pytest.LogCaptureFixture) -> None:
    """The rest stays as it is in the file."""
    load_runner(str(FILES / "fp8"), options())
    assert "7 of the linear layers" in caplog.text
    caplog.clear()
    loaded = load_model(str(FILES / "fp8"), device=CPU)
    runner = runner_of(loaded, options(quantization="int8"))
    assert not caplog.text
    assert off(runner, "fp8") < 0.05
    loaded = load_model(str(FILES / "gptq"), device=CPU, decoder=NativeDecoder)
    runner_of(loaded, options(quantization="int8"))
    model: Any = loaded.model
    assert model.model.layers[0].mlp.down_proj.quantized.bits == 4
    assert model.model.embed_tokens.quantized.bits == 8


def test_a_file_of_two_dtypes_takes_the_one_that_is_asked_for() -> None:
    """Native code does not compute in fp16, so `auto` is bf16. Norms are in fp32 in the file."""
    for name, asked, dtype in (
        ("small-f16.gguf", "auto", torch.bfloat16),
        ("small-f16.gguf", "float32", torch.float32),
        ("awq", "float32", torch.float32),
        ("small-q8_0.gguf", "auto", torch.bfloat16),
    ):
        loaded = load_model(str(FILES / name), device=CPU, dtype=asked)  # type: ignore[arg-type]
        assert {it.dtype for it in loaded.model.parameters()} == {dtype}


def test_end_tokens_come_from_the_files(tmp_path: Path) -> None:
    assert load_model(str(FILES / "qwen3-q8_0.gguf"), device=CPU).end_token_ids == {287}
    folder = shutil.copytree(FILES / "gptq", tmp_path / "gptq")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_model(str(folder), device=CPU).end_token_ids == {7, 9}


@pytest.mark.parametrize("name", ["small-q8_0.gguf", "qwen3-q8_0.gguf"])
def test_the_tokenizer_is_in_the_file(name: str) -> None:
    tokenizer = HuggingFaceTokenizer.load(str(FILES / name))
    for text in ("The quick brown fox", "naïve 日本語 42\n\n  x"):
        ids = tokenizer.encode_text(text)
        assert 0 < len(ids) <= 4 * len(text)
        assert tokenizer.decode(ids).strip() == text


def test_zeros_of_gptq_carry_as_its_tools_let_them() -> None:
    """The format `gptq` has zeros less one; of a zero of 0 the neighbour's place loses one."""
    zeros = [0, 8, 8, 15, 3, 0, 1, 8]
    word = sum(zero << 4 * place for place, zero in enumerate(zeros)) - 0x11111111
    word = (word + 2**31) % 2**32 - 2**31
    parts = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),  # 32 inputs of 8 outputs
        "qzeros": torch.tensor([[word]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = GPTQ({"bits": 4}).weight(parts)
    assert isinstance(weight, QuantizedWeight)
    assert weight.dequantized()[:, 0].tolist() == [-zero for zero in zeros]


def test_an_output_layer_may_be_quantized_too(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FILES / "ct-w8a8", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float()
    scales = embedding.abs().amax(1, keepdim=True) / 127
    tensors["lm_head.weight"] = (embedding / scales).round().to(torch.int8)
    tensors["lm_head.weight_scale"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(str(folder), device=CPU, decoder=NativeDecoder)
    runner = runner_of(loaded, options())
    assert runner.why_no_own_code == ""
    model: Any = loaded.model
    assert isinstance(model.lm_head, QuantizedLinear)
    assert not isinstance(model.model.embed_tokens, QuantizedEmbedding)
    assert off(runner, "ct-w8a8") < 0.05


def test_a_directory_may_be_named_like_a_gguf_file(tmp_path: Path) -> None:
    folder = shutil.copytree(FILES / "gptq", tmp_path / "model.gguf")
    assert load_model(str(folder), device=CPU).format == "gptq"


def test_a_worker_serves_a_gguf_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its tokenizer, its own name and fingerprint, wherever it is started."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(FILES / "qwen3-q8_0.gguf", "small-q8_0.GGUF")  # another model of the same name
    settings = read_worker_settings(model=str(FILES / "small-q8_0.gguf"), kv_cache_memory="4M")
    served = build(settings)
    assert served.identity.name == "small-q8_0"
    assert "weights of GGUF Q8_0" in served.method
    wide = build(settings.model_copy(update={"native": False})).method
    assert wide == "no native code (it is turned off), weights widened from GGUF Q8_0"
    assert served.dtype == "bfloat16"
    assert served.end_token_ids == {2}
    assert identify(settings) == served.identity
    other = identify(read_worker_settings(model="small-q8_0.GGUF"))
    assert other.name == "small-q8_0"
    assert other.fingerprint != served.identity.fingerprint
    assert fits_beside_others(settings)
