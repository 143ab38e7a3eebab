"""How much memory a start takes at its peak, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from promptq.shared.errors import ConfigurationError
from promptq.worker.engine.decoders.native import NativeDecoder
from promptq.worker.engine.model import loading
from promptq.worker.engine.model.backend_choice import decoder_of_saved_weights
from promptq.worker.engine.model.loading import LoadOptions, load_model
from promptq.worker.engine.quantization.modules import QuantizedEmbedding, QuantizedLinear
from tests.support.fork_server import WORKER, ForkedProcess, fork_server
from tests.worker.engine.checkpoints.test_formats import CPU, FILES
from tests.worker.engine.tiny_models import make_model

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
LOAD = """
import json, sys
from benchmarks.lib.memory import watching_own_memory
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner

with watching_own_memory() as peak:
    options = json.loads(sys.argv[2])
    runner = load_runner(sys.argv[1], LoadOptions(device="cpu", **options))
assert runner.why_no_own_code == "", runner.why_no_own_code
print(peak[0])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A directory, and how many bytes its weights have."""
    folder = tmp_path_factory.mktemp("model")
    made: Any = make_model("qwen3", 0, **SHAPE).to(torch.bfloat16)
    made.save_pretrained(folder)
    return folder, sum(2 * parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize(("quantization", "most"), [("none", 1.75), ("int4", 1.2)])
def test_a_start_makes_no_copy_of_the_wide_weights(
    model: tuple[Path, int], quantization: str, most: float
) -> None:
    """Wide weights stay pages of the file. Only packed ones belong to the process: 1.0 or 0.3 of
    their size. The rest are buffers, which do not grow with the model."""
    folder, num_bytes = model
    options = {"quantization": quantization, "kv_cache_memory": 2**20}
    command = [sys.executable, "-c", LOAD, str(folder), json.dumps(options)]
    server = fork_server(WORKER)
    with ForkedProcess(command, server=server, stdout=subprocess.PIPE, text=True) as process:
        printed = process.communicate()[0]
    assert process.returncode == 0
    share = int(printed.splitlines()[-1]) / num_bytes
    print(f"{quantization}: {share:.2f} of {num_bytes / 1e6:.0f} MB")
    assert share < most


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
@pytest.mark.parametrize("name", ["small-q4_0.gguf", "gptq", "awq", "ct-fp8"])
def test_weights_that_fused_kernels_take_are_moved_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a device without values in the place of a card."""
    from promptq.worker.engine.decoders.kernels.fused import FusedDecoder

    cuda, meta = torch.device("cuda", 0), torch.device("meta")
    assert decoder_of_saved_weights(cuda, LoadOptions()) is FusedDecoder
    assert decoder_of_saved_weights(cuda, LoadOptions(native=False)) is None
    monkeypatch.setattr(loading, "free_bytes", lambda _: 2**40)
    loaded = load_model(str(FILES / name), device=meta, decoder=FusedDecoder)
    inner = [it for name, it in loaded.model.named_modules() if name.endswith("_proj")]
    assert inner
    for module in inner:
        assert isinstance(module, QuantizedLinear)
        assert {each.device for each in module.quantized.tensors} == {meta}
    whole: Any = loaded.model
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if isinstance(embedding, QuantizedEmbedding):
        assert head.quantized is embedding.quantized


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_what_weights_take_in_fact_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in fp8 are widened for a model in fp32, and take four times as much."""
    from promptq.worker.engine.decoders.kernels.fused import FusedDecoder

    folder, meta = FILES / "ct-fp8", torch.device("meta")
    saved = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(loading, "free_bytes", lambda it: 2 * saved if it == meta else 2**40)
    load_model(str(folder), device=meta, decoder=FusedDecoder)
    with pytest.raises(ConfigurationError, match=r"widened .*GiB are free on meta"):
        load_model(str(folder), device=meta, dtype="float32", decoder=FusedDecoder)


@pytest.mark.parametrize("name", ["small-q4_0.gguf", "gptq", "awq"])
def test_weights_that_native_code_takes_are_never_widened(name: str) -> None:
    loaded = load_model(str(FILES / name), device=CPU, decoder=NativeDecoder)
    inner = [it for name, it in loaded.model.named_modules() if name.endswith("_proj")]
    assert inner
    assert all(isinstance(it, QuantizedLinear) for it in inner)
    embedding: Any = loaded.model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding) == name.endswith(".gguf")
