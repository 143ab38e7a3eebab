"""Loading: what is not a causal LM with safetensors is told in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from promptq.shared.errors import (
    ConfigurationError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from promptq.worker.engine.attention import kv_cache_size
from promptq.worker.engine.attention.kv_cache import KVCache, bytes_per_token
from promptq.worker.engine.attention.kv_cache_size import (
    CPU_SHARE,
    default_memory_bytes,
    fitting_blocks,
)
from promptq.worker.engine.attention.types import LayerSpec
from promptq.worker.engine.device.memory import free_bytes
from promptq.worker.engine.model.backend_choice import resolve_device
from promptq.worker.engine.model.loading import LoadedModel, LoadOptions, load_model
from promptq.worker.engine.runner.load_runner import load_runner
from tests.worker.engine.tiny_models import save_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(source: Path | str, **options: Any) -> LoadedModel:
    return load_model(str(source), device=CPU, **options)


def change_config(directory: Path, **fields: Any) -> None:
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def test_loads(model_dir: Path) -> None:
    loaded = load(model_dir)
    assert loaded.family == "llama"
    assert loaded.end_token_ids == {2}
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(model_dir: Path, dtype: Any) -> None:
    assert load(model_dir, dtype=dtype).model.dtype == getattr(torch, dtype)
    runner = load_runner(
        str(model_dir), LoadOptions(device="cpu", dtype=dtype, kv_cache_memory=10**6)
    )
    size = 4 if dtype == "float32" else 2
    assert runner.kv_layout.bytes_per_token == 2 * 2 * (8 + 8) * size


def test_auto_dtype_is_that_of_the_weights(copy: Path) -> None:
    assert load(copy).model.dtype == torch.float32
    weights = load_file(copy / "model.safetensors")
    halves = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(halves, copy / "model.safetensors", metadata={"format": "pt"})
    change_config(copy, dtype="bfloat16")
    assert load(copy).model.dtype == torch.bfloat16


def test_end_tokens(copy: Path) -> None:
    settings = copy / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load(copy).end_token_ids == {2, 7}
    settings.unlink()
    change_config(copy, eos_token_id=5)
    assert load(copy).end_token_ids == {5}
    change_config(copy, eos_token_id=None)
    assert load(copy).end_token_ids == frozenset()


def test_missing_directory(tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", "./nowhere", "nowhere"):
        with pytest.raises(ModelNotFoundError, match="there is no such directory"):
            load(name)


def test_file_instead_of_a_directory(model_dir: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is neither a model directory nor"):
        load(model_dir / "config.json")


def without_a_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


Damage = Callable[[Path], Any]
DAMAGES: dict[str, tuple[Damage, type[ModelError], str]] = {
    "no config": (
        lambda it: (it / "config.json").unlink(), ModelNotFoundError, r"has no config\.json",
    ),
    "a config that is no JSON": (
        lambda it: (it / "config.json").write_text("{"),
        ModelNotFoundError, r"config\.json is not JSON",
    ),
    "a config without a family": (
        lambda it: (it / "config.json").write_text("{}"),
        ModelNotFoundError, r"config\.json has no model_type",
    ),
    "an unknown family": (
        lambda it: change_config(it, model_type="nonsense"), UnsupportedModelError, "nonsense",
    ),
    "no causal LM": (
        lambda it: change_config(it, model_type="vit"),
        ModelNotFoundError, r"is not a causal language model \(its family is 'vit'\)",
    ),
    "other weights than safetensors": (
        lambda it: (it / "model.safetensors").rename(it / "pytorch_model.bin"),
        ModelNotFoundError, r"has no \*\.safetensors weights",
    ),
    "broken weights": (
        lambda it: (it / "model.safetensors").write_bytes(b"broken"),
        UnsupportedModelError, "the weights of this 'llama' model",
    ),
    "a missing weight, which the library would fill with random numbers": (
        without_a_weight, UnsupportedModelError, r"1 weights .* are missing, .*up_proj",
    ),
    "weights of another shape": (
        lambda it: change_config(it, intermediate_size=40),
        UnsupportedModelError, r"weights have other sizes .*down_proj\.weight: \[",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_directory_is_refused_in_one_sentence(name: str, copy: Path) -> None:
    damage, kind, said = DAMAGES[name]
    damage(copy)
    with pytest.raises(kind, match=said) as caught:
        load(copy)
    message = str(caught.value)
    assert message.startswith(str(copy))
    assert "\n" not in message
    assert not message.endswith(".")
    assert len(message) < 300 + len(str(copy))


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to the hub to load the files.\nCheck your connection")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(ModelNotFoundError) as caught:
        load("somebody/something")
    assert str(caught.value) == (
        "somebody/something: We couldn't connect to the hub to load the files"
    )


def test_options_that_cannot_work(model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="--dtype: 'int8'"):
        load(model_dir, dtype="int8")
    with pytest.raises(ConfigurationError, match="--device: 'tpu'"):
        resolve_device("tpu")
    with pytest.raises(ConfigurationError, match="--device: 'cuda:99'"):
        resolve_device("cuda:99")
    with pytest.raises(ConfigurationError, match="needs at least 8192 bytes"):
        load_runner(str(model_dir), LoadOptions(device="cpu", kv_cache_memory=8191))
    with pytest.raises(ConfigurationError, match="--max-model-len: 500"):
        load_runner(str(model_dir), LoadOptions(device="cpu", max_model_len=500))
    assert issubclass(UnsupportedModelError, ModelError)


def test_the_cache_is_as_large_as_asked_for(model_dir: Path) -> None:
    runner = load_runner(str(model_dir), LoadOptions(device="cpu", kv_cache_memory=100_000))
    layout = runner.kv_layout
    assert layout.num_blocks == 100_000 // (layout.bytes_per_token * layout.block_size)
    cache = runner.cache
    held = sum(layer.key.nbytes + layer.value.nbytes for layer in cache.layers)
    assert held == layout.num_blocks * layout.block_size * layout.bytes_per_token


def test_the_cache_is_as_large_as_it_can_be_used(model_dir: Path) -> None:
    runner = load_runner(
        str(model_dir), LoadOptions(device="cpu", max_num_seqs=3, max_model_len=100)
    )
    assert runner.kv_layout.num_blocks == -(-3 * 100 // 16)
    assert runner.max_model_len == 100
    assert runner.vocab_size == 97
    assert runner.peak_memory_bytes() > 2**20


def test_the_cache_takes_a_share_of_what_is_free() -> None:
    spec = LayerSpec(4, 2, 64, 32, torch.float16, torch.float32)
    assert bytes_per_token([spec, spec]) == 2 * 2 * (64 * 2 + 32 * 4)
    memory = default_memory_bytes(CPU)
    assert memory > 0
    blocks = fitting_blocks(
        [spec], block_size=16, memory_bytes=None, wanted_tokens=10**15, device=CPU
    )
    assert 0.5 * memory < blocks * 16 * spec.bytes_per_token < 1.5 * memory


@pytest.mark.parametrize(("fitting", "wanted", "held"), [(2, 1, 2), (3, 48, 3), (9, 48, 3)])
def test_the_cache_holds_at_least_two_blocks_and_no_more_than_wanted(
    fitting: int, wanted: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LayerSpec(4, 2, 8, 8, torch.float32, torch.float32)
    memory = fitting * 16 * spec.bytes_per_token
    monkeypatch.setattr(kv_cache_size, "free_bytes", lambda _: -(-memory // CPU_SHARE))
    assert held == fitting_blocks(
        [spec], block_size=16, memory_bytes=None, wanted_tokens=wanted, device=CPU
    )


def test_memory_for_one_block_alone_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LayerSpec(4, 2, 8, 8, torch.float32, torch.float32)
    free = 1.5 * 16 * spec.bytes_per_token / 0.4
    monkeypatch.setattr(kv_cache_size, "free_bytes", lambda _: free)
    with pytest.raises(ConfigurationError, match=r"hold 1 blocks of 16 tokens.* at least"):
        fitting_blocks([spec], block_size=16, memory_bytes=None, wanted_tokens=1, device=CPU)


def test_weights_that_were_just_read_count_as_free(tmp_path: Path) -> None:
    """They are in the page cache, which a container counts as used until it needs it."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 700000\nactive_file 5\n")
    assert free_bytes(CPU, tmp_path) == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU, tmp_path) > 1_000_000


def test_shared_layers_share_memory() -> None:
    own = LayerSpec(4, 2, 8, 8, torch.float32, torch.float32)
    sharing = LayerSpec(4, 2, 8, 8, torch.float32, torch.float32, shares_kv_of=0)
    cache = KVCache([own, sharing], num_blocks=3, block_size=4, device=CPU)
    assert cache.layers[0] is cache.layers[1]
    assert cache.bytes_per_token == 2 * (8 + 8) * 4
    assert cache.layers[0].key.shape == (3, 2, 4, 8)
