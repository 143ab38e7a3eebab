"""GGUF files of mixtures of experts, whose weights keep their few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from benchmarks.lib.gguf_file import gguf_name
from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.decoders.native import NativeDecoder
from promptq.worker.engine.load_check.comparison import off_by
from promptq.worker.engine.model.loading import LoadOptions, load_model
from promptq.worker.engine.quantization.modules import QuantizedExperts
from promptq.worker.engine.runner.load_runner import load_runner
from tests.worker.engine.checkpoints.test_refused import rewritten
from tests.worker.engine.quantization.test_quantization import logprobs_of
from tests.worker.engine.tiny_models import VOCAB_SIZE, make_model

SEED = 3
CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "initializer_range": 0.1,
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}
BITS = {"Q8_0": 8, "Q5_0": 8, "Q4_0": 4}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Arranges rows as llama.cpp's converter does for the architecture `llama`."""
    pairs = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def save_gguf(to: Path, family: str, kinds: dict[str, str]) -> Any:
    """Writes a random model. `kinds` are the types of the experts' tensors; other matrices are in
    Q8_0. Returns the model with the numbers that the file has."""
    model: Any = make_model(family, SEED, **SHAPE)
    config, architecture = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(str(to), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)

    def added(name: str, numbers: np.ndarray, kind: str) -> np.ndarray:
        """Adds a tensor, and returns its numbers."""
        type_ = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(np.ascontiguousarray(numbers), type_)
        place = "output.weight" if name == "lm_head.weight" else gguf_name(name)
        writer.add_tensor(place, data, raw_dtype=type_)
        return gguf.quants.dequantize(data, type_)

    saved = {}
    for name, tensor in model.state_dict().items():
        numbers, part = tensor.numpy(), name.split(".")[-2]
        if name.endswith("experts.gate_up_proj"):
            stem, half = name.removesuffix("gate_up_proj"), numbers.shape[1] // 2
            gate = added(f"{stem}gate_proj.weight", numbers[:, :half], kinds["gate"])
            up = added(f"{stem}up_proj.weight", numbers[:, half:], kinds["up"])
            saved[name] = np.concatenate([gate, up], 1)
        elif name.endswith("experts.down_proj"):
            saved[name] = added(f"{name}.weight", numbers, kinds["down"])
        elif numbers.ndim == 1 or name.endswith("mlp.gate.weight"):
            saved[name] = added(name, numbers, "F32")
        elif architecture == "llama" and part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            order = permuted(np.arange(len(numbers))[:, None], heads)[:, 0]
            saved[name] = added(name, numbers[order], "Q8_0")[np.argsort(order)]
        else:
            saved[name] = added(name, numbers, "Q8_0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict({name: torch.from_numpy(each.copy()) for name, each in saved.items()})
    return model


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3_moe", {"gate": "Q4_0", "up": "Q4_0", "down": "Q8_0"}),
        ("mixtral", {"gate": "Q5_0", "up": "Q4_0", "down": "Q4_0"}),
        ("mixtral", {"gate": "Q8_0", "up": "Q8_0", "down": "F16"}),
    ],
    ids=["qwen3_moe", "mixtral", "partly wide"],
)
def test_experts_keep_their_bits(family: str, kinds: dict[str, str], tmp_path: Path) -> None:
    """Wide and quantized, in the library's code and in ours, they have the numbers of the file."""
    file = tmp_path / "experts.gguf"
    wanted = save_gguf(file, family, kinds)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, VOCAB_SIZE, (20,), generator=generator).tolist()
    expected = logits_of(wanted, ids)
    wide = load_model(str(file), device=CPU, dtype="float32")
    assert wide.family == family
    assert off_by(logits_of(wide.model, ids), expected).max() < 1e-5

    loaded = load_model(str(file), device=CPU, dtype="float32", decoder=NativeDecoder)
    assert off_by(logits_of(loaded.model, ids), expected).max() < 1e-5
    modules = [each for each in loaded.model.modules() if isinstance(each, QuantizedExperts)]
    experts = [expert for each in modules for expert in each.quantized]
    bits = {tuple(weight.bits for weight in expert) for expert in experts}
    is_kept = kinds.keys() == {kind for kind in kinds if kinds[kind] in BITS}
    assert bits == ({tuple(BITS[kind] for kind in kinds.values())} if is_kept else set())
    assert len(modules) == (2 if is_kept else 0)

    of_next = expected.log_softmax(-1)[9:-1].gather(1, torch.tensor(ids[10:]).unsqueeze(1))[:, 0]
    spread = expected.std(dim=1)[9:-1]
    for native, most in ((True, 0.1), (False, 1e-4)):  # products of native code round inputs
        options = LoadOptions(
            device="cpu", block_size=4, kv_cache_memory=8_000_000, dtype="float32", native=native
        )
        runner = load_runner(str(file), options)
        assert (runner.why_no_own_code == "") == native
        found = torch.tensor(logprobs_of(runner, ids[:10], ids[10:]))
        assert ((found - of_next).abs() / spread).mean() < most


def test_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "experts.gguf"
    save_gguf(file, "qwen3_moe", {"gate": "Q4_0", "up": "Q4_0", "down": "Q4_0"})
    other = rewritten(file, tmp_path / "other.gguf", **{"qwen3moe.expert_count": 4})
    with pytest.raises(UnsupportedModelError, match="numbers, and Qwen3MoeForCausalLM needs"):
        load_model(str(other), device=CPU)
