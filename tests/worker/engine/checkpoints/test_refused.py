"""Quantized checkpoints that are damaged or not read: one sentence says which and why."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from promptq.shared.errors import ConfigurationError, ModelError, UnsupportedModelError
from promptq.shared.runtime import extras
from promptq.shared.settings.worker import read_worker_settings
from promptq.worker.engine.model.loading import load_model
from promptq.worker.serve.build import build, identify
from tests.worker.engine.checkpoints.test_formats import FILES

CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.down_proj"


def refusal(source: Path | str) -> str:
    with pytest.raises((ModelError, ConfigurationError)) as refused:
        load_model(str(source), device=CPU)
    said = str(refused.value)
    assert "\n" not in said
    assert str(source) in said
    return said


def copied(name: str, to: Path, **settings: Any) -> Path:
    """The fixture, with other settings of its quantization."""
    folder = Path(shutil.copytree(FILES / name, to / name))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("gptq", {"quant_method": "hqq"}, "quantized by the method 'hqq', but promptq reads only"),
        ("gptq", {"bits": 3}, "gptq: its weights have 3 bits, but only 4 or 8 are supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq: its format 'marlin' is not one of"),
        ("awq", {"version": "gemv", "format": "gemv"}, "awq: its version is 'gemv'"),
        ("ct-w4a16", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not one of"),
        ("ct-w4a16", {"sparsity_config": {"format": "sparse-24"}}, "weights are sparse"),
        ("ct-w4a16", {"transform_config": {"config_groups": {"u": {}}}}, "it transforms inputs"),
        (
            "ct-w4a16",
            {"config_groups": {"a": {"weights": {"num_bits": 6, "type": "int"}}}},
            "weights have 6 bits",
        ),
        (
            "ct-w4a16",
            {"config_groups": [1]},
            "quantization_config is not one of compressed-tensors",
        ),
        ("gptq", {"quant_method": ["x"]}, "quantized by the method"),
    ],
)
def test_what_is_not_read_is_named(
    name: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(copied(name, tmp_path, **settings))


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        ("gptq", "qzeros", f"the gptq layer {LAYER} has no qzeros, only"),
        ("gptq", "qweight", "1 weights that LlamaForCausalLM needs are missing"),
        ("awq", "scales", f"the awq layer {LAYER} has no scales, only"),
        ("ct-w4a16", "weight_packed", f"layer {LAYER} has no weight, only"),
        ("ct-w4a16", "weight_shape", f"layer {LAYER} has no weight_shape, only"),
        ("ct-w8a8", "weight_scale", f"{LAYER}.weight is in torch.int8, and there is no {LAYER}"),
        ("fp8", "weight", f"the fp8 layer {LAYER} has no weight, only"),
    ],
)
def test_a_missing_part_is_named(name: str, part: str, expected: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{LAYER}.{part}"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert expected in refusal(folder)


def test_tensors_that_nobody_takes_are_named(tmp_path: Path) -> None:
    """They may change what the model computes, as some scales of AWQ do."""
    folder = copied("awq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)  # of a KV cache of few bits
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    load_model(str(folder), device=CPU)
    tensors["model.layers.0.mlp.act.scales"] = torch.ones(128)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "1 tensors that LlamaForCausalLM does not know, for example" in refusal(folder)


def test_other_files_of_a_folder_may_be_damaged_too(tmp_path: Path) -> None:
    folder = copied("gptq", tmp_path)
    (folder / "generation_config.json").write_text("{")
    refusal(folder)
    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    refusal(folder)
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    load_model(str(folder), device=CPU)


def test_parts_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    folder = copied("gptq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.scales"] = tensors[f"{LAYER}.scales"][:, :-8].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"the gptq layer {LAYER} has parts of wrong sizes" in refusal(folder)
    tensors = load_file(FILES / "gptq" / "model.safetensors")
    tensors[f"{LAYER}.scales"] = torch.full_like(tensors[f"{LAYER}.scales"], float("inf"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "not finite" in refusal(folder)


def rewritten(
    source: Path,
    to: Path,
    *,
    without: str = "",
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    architecture: str = "",
    **fields: Any,
) -> Path:
    """A GGUF file without a tensor, with others, or with other fields."""
    reader = gguf.GGUFReader(source)
    name = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(to, architecture or name)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in fields:
            continue
        kind = field.types[0]
        of_items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, of_items)
    for key, value in fields.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for key, data in (extra or {}).items():
        writer.add_tensor(key, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_a_header_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    """Quantized weights are counted before the library reads the header."""
    folder = copied("gptq", tmp_path)
    header = b"[" * 100_000
    content = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(content)
    assert "Error while deserializing header" in refusal(folder)


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_complete", lambda extra: extra != "gguf")
    said = r"a GGUF file needs packages that are not installed: pip install .*whl\)\[gguf\]"
    for load in (build, identify):
        with pytest.raises(ConfigurationError, match=said):
            load(read_worker_settings(model=str(FILES / "small-q8_0.gguf")))


def test_a_gguf_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    whole = (FILES / "small-q8_0.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"not a model" * 100, whole[:1000], whole[: len(whole) // 2]):
        broken.write_bytes(content)
        assert "broken.gguf: " in refusal(broken)
    assert "there is no such file" in refusal(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"without": "blk.0.ffn_down.weight"}, "1 weights that LlamaForCausalLM needs are missing"),
        ({"extra": {"blk.0.strange.weight": np.ones(4, np.float32)}}, "does not know, for example"),
        (
            {"architecture": "gemma3"},
            "of the architecture 'gemma3', but promptq reads only GGUF files of llama",
        ),
        ({"split.count": 3}, "is one of 3 parts; make one file of them with llama-gguf-split"),
        ({"llama.rope.scaling.type": "yarn"}, "positions are scaled by 'yarn'"),
        ({"llama.rope.scale_linear": 2.0}, "rope.scale_linear is 2.0, which is not supported"),
        ({"llama.attention.scale": 0.5}, "attention.scale is 0.5, which is not supported"),
    ],
)
def test_what_a_gguf_file_has_and_is_not_read_is_named(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = rewritten(FILES / "small-q8_0.gguf", tmp_path / "other.gguf", **changes)
    assert expected in refusal(file)


def test_a_gguf_file_with_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    whole = gguf.quants.quantize(np.ones((64, 256), np.float32), gguf.GGMLQuantizationType.TQ1_0)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("token_embd.weight", whole, raw_dtype=gguf.GGMLQuantizationType.TQ1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = refusal(tmp_path / "t.gguf")
    assert "has weights of the type TQ1_0, but promptq reads only Q8_0, " in said


def test_a_rewritten_gguf_file_is_served(tmp_path: Path) -> None:
    """So that the refusals above are for what was changed."""
    file = rewritten(FILES / "small-q8_0.gguf", tmp_path / "same.gguf")
    assert "GGUF" in load_model(str(file), device=CPU).format


def test_rope_scaling_of_llama_3_is_found_by_its_factors(tmp_path: Path) -> None:
    """A file has only how much each frequency is divided by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = load_model(str(FILES / "small-q8_0.gguf"), device=CPU).text_config
    theta = plain.rope_parameters["rope_theta"]
    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=plain.head_dim, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    unscaled = theta ** -(torch.arange(0, plain.head_dim, 2).float() / plain.head_dim)
    factors = (unscaled / scaled).numpy()
    assert factors.max() > 2
    file = rewritten(
        FILES / "small-q8_0.gguf", tmp_path / "l3.gguf", extra={"rope_freqs.weight": factors}
    )
    loaded = load_model(str(file), device=CPU)
    model: Any = loaded.model
    assert torch.allclose(model.model.rotary_emb.inv_freq, scaled, rtol=1e-4)
    factors[-1] *= 1.5
    strange = rewritten(
        FILES / "small-q8_0.gguf", tmp_path / "strange.gguf", extra={"rope_freqs.weight": factors}
    )
    with pytest.raises(UnsupportedModelError, match="not scaled like those of Llama 3"):
        load_model(str(strange), device=CPU)


@pytest.mark.parametrize("field", ["feed_forward_length", "embedding_length"])
def test_a_gguf_file_whose_sizes_are_not_those_of_its_tensors(field: str, tmp_path: Path) -> None:
    """A model of these sizes would fill the memory."""
    sizes: dict[str, Any] = {f"qwen3.{field}": 8_000_000}
    file = rewritten(FILES / "qwen3-q8_0.gguf", tmp_path / "large.gguf", **sizes)
    assert "numbers, and Qwen3ForCausalLM needs" in refusal(file)


def test_an_error_for_a_folder_of_gguf_files_says_how_to_name_one(tmp_path: Path) -> None:
    shutil.copy(FILES / "small-q8_0.gguf", tmp_path / "a.gguf")
    assert f"name that: --model {tmp_path}/a.gguf" in refusal(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"1")
    assert "is neither a model directory nor a file that ends with" in refusal(
        tmp_path / "weights.bin"
    )


def test_damaged_bytes_are_refused_or_harmless(tmp_path: Path, seed: int) -> None:
    """Wherever they are: nothing but a refusal ends a load."""
    draw = random.Random(seed)
    whole = (FILES / "qwen3-q8_0.gguf").read_bytes()
    refused = 0
    for _ in range(25):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 2, 5])):
            content[draw.randrange(9000)] = draw.randrange(256)
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content)
        try:
            load_model(str(broken), device=CPU)
        except (ModelError, ConfigurationError):
            refused += 1
    assert refused > 0
