"""Real servers apply LoRA adapters: the tokens are those of merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lib.gguf_file import gguf_name
from promptq import Client
from promptq.worker.shipped import MODEL_DIR
from tests.programs.engines.real_servers import (
    GREEDY,
    NUM_TOKENS,
    RealServer,
    real_server,
    undisturbed,
    why_missing,
)
from tests.support.processes import started
from tests.support.roles import as_role
from tests.worker.engine.tiny_models import generate

RANK = 8
NAMES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
PROMPTS = ("Once upon a time", "The old king", "One day a fox")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    if why := why_missing("vllm"):
        pytest.skip(why)
    options = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        with real_server("vllm", folder, arguments=(*options, "--enforce-eager")) as running:
            yield running


def saved_adapter(folder: Path, seed: int) -> tuple[Path, Any]:
    """Saves a random adapter of the shipped model. Returns its folder, and the merged model."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for number, layer in enumerate(model.model.layers):
        for name in NAMES:
            weight = layer.get_submodule(name).weight
            place = f"base_model.model.model.layers.{number}.{name}"
            down = torch.randn(RANK, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.03
            tensors |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
            weight.data += up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(MODEL_DIR),
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": [name.split(".")[1] for name in NAMES],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, model


def saved_gguf(file: Path, folder: Path) -> Path:
    """Saves an adapter's weights in llama.cpp's format."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        place, half, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        writer.add_tensor(f"{gguf_name(f'{place}.weight')}.{half.lower()}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_llama_cpp_applies_the_adapter_of_the_name_also_behind_a_killed_worker(
    redis_url: str, tmp_path: Path
) -> None:
    if why := why_missing("llama.cpp"):
        pytest.skip(why)
    arguments, merged = list[str](), {}
    for seed in (1, 2):
        folder, merged[folder] = saved_adapter(tmp_path / f"adapter{seed}", seed)
        file = saved_gguf(tmp_path / f"{folder.name}.gguf", folder)
        arguments += ["--lora", str(file)]
    with real_server("llama.cpp", tmp_path / "server", arguments=arguments) as server:
        for folder, model in merged.items():
            assert tokens_behind_a_kill(redis_url, tmp_path, server, folder) == tokens_of(model)


def test_vllm_loads_adapters_also_behind_an_unload_and_a_killed_worker(
    redis_url: str, tmp_path: Path, server: RealServer
) -> None:
    for seed in (1, 2):
        folder, merged = saved_adapter(tmp_path / f"adapter{seed}", seed)
        assert tokens_behind_a_kill(redis_url, tmp_path, server, folder) == tokens_of(merged)


def tokens_of(merged: Any) -> list[list[int]]:
    """Returns the merged model's tokens. Checks that they differ from the tokens without an
    adapter."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokens = [generate(merged, tokenizer.encode(prompt), NUM_TOKENS) for prompt in PROMPTS]
    assert tokens[0] != undisturbed(PROMPTS[0], NUM_TOKENS)
    return tokens


def tokens_behind_a_kill(
    redis_url: str, tmp_path: Path, server: RealServer, folder: Path
) -> list[list[int]]:
    """Returns the tokens of requests whose first worker is killed. Unloads the adapter of a vLLM
    meanwhile."""
    options = (
        *("--engine", server.name, "--upstream", server.url, "--dtype", "float32"),
        *("--model", str(folder), "--queue", folder.name, "--lease-ms", "2000"),
    )
    with Client(as_role("operator", redis_url), queue=folder.name) as client:
        with started(tmp_path, redis_url, *options) as first:
            fields = {**GREEDY, "model": folder.name, "ignore_eos": True}
            ids = [client.enqueue(prompt, **fields) for prompt in PROMPTS]
            next(client.stream(ids[0]))
            first.process.kill()
        if server.name == "vllm":
            body = {"lora_name": folder.name}
            httpx2.post(f"{server.url}/v1/unload_lora_adapter", json=body).raise_for_status()
        with started(tmp_path, redis_url, *options):
            return [client.result(request_id).token_ids for request_id in ids]
