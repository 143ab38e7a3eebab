"""Models from strangers: files that lead elsewhere, pickles, absurd sizes, and damaged weights."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from promptq.shared.errors import ConfigurationError, ModelError
from promptq.worker.engine.checkpoints.safe_files import MAX_BYTES
from promptq.worker.engine.model.loading import LoadOptions, load_model
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.model_files import read_model_facts
from tests.worker.engine.checkpoints.test_formats import FILES
from tests.worker.engine.tiny_models import save_model

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("plain"), "llama", 1, vocab_size=2055)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


def refusal(load: Callable[[], Any]) -> str:
    with pytest.raises((ModelError, ConfigurationError)) as refused:
        load()
    said = str(refused.value)
    assert "\n" not in said
    return said


def loads(folder: Path | str) -> list[Callable[[], Any]]:
    return [
        lambda: load_model(str(folder), device=CPU),
        lambda: HuggingFaceTokenizer.load(str(folder)),
        lambda: read_model_facts(str(folder)),
    ]


def read(folder: Path) -> tuple[float, list[list[int]], Any]:
    """Returns the sum of all weights, the tokens of a text, and the model's facts."""
    model, tokenizer, facts = (load() for load in loads(folder))
    total = sum(float(weight.sum()) for weight in model.model.parameters())
    return total, tokenizer.encode_text(["Once upon a time"]), facts


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"),
        *("generation_config.json", "special_tokens_map.json", "model-2.safetensors", INDEX),
        *("additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "vocab.txt"),
    ],
)
def test_a_file_that_leads_out_of_the_folder_is_refused(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    outside = folder.parent / "outside"
    outside.write_text("{}")
    for target in ("/proc/self/environ", outside):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        for load in loads(folder):
            assert f"{name} leads out of the folder" in refusal(load)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for load in loads(folder):
        assert f"{name} is not a regular file" in refusal(load)


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "tokenizer.json", "config.json", "generation_config.json"),
        *("additional_chat_templates/tool_use.jinja", INDEX, "vocab.txt", "modeling.py"),
    ],
)
def test_a_file_that_would_fill_the_memory_is_refused(name: str, folder: Path) -> None:
    """A sparse file, which takes no place on the disk."""
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("ab") as file:
        file.truncate(MAX_BYTES + 1)
    for load in loads(folder):
        assert f"{name} has 134,217,729 bytes; at most 134,217,728 are read" in refusal(load)


def test_a_folder_that_is_a_link_to_files_elsewhere_is_refused(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (other / "secret.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(other)
    for load in loads(folder):
        assert "secret.jinja leads out of the folder" in refusal(load)


@pytest.mark.parametrize("name", ["vocab", "merges", "vocab_file"])
def test_a_tokenizer_that_names_a_file_elsewhere_is_refused(name: str, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    inside = folder / "vocab.txt"
    inside.write_text("[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\ninside\n")
    outside = Path(shutil.copy(inside, folder.parent / "outside"))
    config = {"tokenizer_class": "BertTokenizer", name: str(outside)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    said = refusal(lambda: HuggingFaceTokenizer.load(str(folder)))
    assert f"tokenizer_config.json has {name} {str(outside)!r}, a file that is not" in said
    for value in ("/no/such/vocab.txt", str(inside)):
        if name == "vocab_file":  # names of a former place are usual there
            (folder / "tokenizer_config.json").write_text(json.dumps({**config, name: value}))
            assert HuggingFaceTokenizer.load(str(folder)).encode_text("inside") == [5]


def test_links_inside_of_a_folder_and_of_the_hubs_cache_are_read(folder: Path) -> None:
    expected = read(folder)
    cache = folder.parent / "models--owner--name"
    snapshot = cache / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in folder.iterdir():
        file.rename(cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (snapshot / "vocab.txt").symlink_to("tokenizer.json")
    link = folder.parent / "link"
    link.symlink_to(snapshot)
    for place in (snapshot, link):
        assert read(place) == expected


class Unpickled:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("unpickled",))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "x.pt", "../x.safetensors", "/x.safetensors"]
)
def test_only_safetensors_of_the_folder_are_opened(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if "/" not in name:
        (folder / name).write_bytes(pickle.dumps(Unpickled()))
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}})
    )
    said = refusal(loads(folder)[0])
    assert said.endswith(f"names {name!r}, and only safetensors files beside it are read")
    assert not (folder / "unpickled").exists()


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}})
    )
    assert refusal(loads(folder)[0]) == (
        f"{folder}: model-00002.safetensors, which the index names, is missing; fetch the model"
        " again"
    )


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_shard_is_named(folder: Path, is_cut: bool) -> None:
    """One of several, which was fetched in part or is a page of another kind."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard, {"format": "pt"})
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loads(folder)[0]()
    damaged = folder / "model-2.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2] if is_cut else b"<html>" + bytes(1000))
    assert "do not load: model-2.safetensors is damaged, fetch it again" in refusal(
        loads(folder)[0]
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_local_experts": 0}, "has num_experts_per_tok 3 and num_local_experts 0;"),
        ({"num_experts_per_tok": 9}, "has num_experts_per_tok 9 and num_local_experts 8;"),
        ({"num_experts_per_tok": 0}, "has num_experts_per_tok 0 and num_local_experts 8;"),
        ({"num_experts_per_tok": -2}, "has num_experts_per_tok -2 and num_local_experts 8;"),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_cannot_be_are_refused(
    family: str, fields: dict[str, int], expected: str, tmp_path: Path
) -> None:
    file = save_model(tmp_path, family, 1) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert expected in refusal(lambda: load_model(str(tmp_path), device=CPU))


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("gemma4_text", {"top_k_experts": 0}, "has top_k_experts 0 and num_experts 8;"),
        ("gemma4_text", {"top_k_experts": 9}, "has top_k_experts 9 and num_experts 8;"),
        ("glm4_moe", {"n_group": 0}, "has n_group 0, topk_group 2 and n_routed_experts 8;"),
        ("glm4_moe", {"n_group": 3}, "has n_group 3, topk_group 2 and n_routed_experts 8;"),
        ("glm4_moe", {"topk_group": 0}, "has n_group 4, topk_group 0 and n_routed_experts 8;"),
        ("glm4_moe", {"topk_group": 5}, "has n_group 4, topk_group 5 and n_routed_experts 8;"),
    ],
)
def test_routers_that_cannot_be_are_refused(
    family: str, fields: dict[str, int], expected: str, tmp_path: Path
) -> None:
    experts: dict[str, Any] = {}
    if family == "gemma4_text":
        experts |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
        experts |= {"moe_intermediate_size": 24}
    file = save_model(tmp_path, family, 1, **experts) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert expected in refusal(lambda: load_model(str(tmp_path), device=CPU))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "qwen3_next", "granitemoehybrid"])
def test_a_dense_model_of_a_family_with_experts_is_loaded(family: str, tmp_path: Path) -> None:
    """The model has 0 experts, of which the configuration's default number is active."""
    name = "num_local_experts" if family == "granitemoehybrid" else "num_experts"
    save_model(tmp_path, family, 1, **{name: 0})
    config: Any = load_model(str(tmp_path), device=CPU).model.config
    assert getattr(config, name) == 0 < config.num_experts_per_tok


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_attention_heads": 0}, "impossible sizes"),
        ({"model_type": ["llama"]}, "config.json has no model_type"),
        ({"num_hidden_layers": 20_000}, "has num_hidden_layers 20000, more than 2000"),
        ({"num_hidden_layers": 2**31}, "has num_hidden_layers 2147483648, more than"),
        ({"text_config": {"n_layer": 10**9}}, "has n_layer 1000000000, more than 2000"),
        ({"num_local_experts": 10**6}, "has num_local_experts 1000000, more than 2000"),
        ({"num_labels": 10**9}, "has num_labels 1000000000, more than 2000"),
        ({"hidden_size": 10**12}, "has hidden_size 1000000000000, and a matrix of"),
        ({"intermediate_size": 8_000_000}, "has intermediate_size 8000000, and a matrix of"),
        ({"vocab_size": 10**9}, "has vocab_size 1000000000, and a matrix of"),
        ({"head_dim": 10**7}, "has head_dim 10000000, and a matrix of"),
        ({"num_hidden_layers": 0}, "0 modules of a model of 0 layers"),
        ({"max_position_embeddings": -1}, "its max_position_embeddings are -1"),
        ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads (7)"),
        ({"num_attention_heads": 8}, "self_attn.o_proj.weight: [32, 32] in the files, [32, 64] by"),
        ({"num_key_value_heads": 3}, "weights have other sizes than config.json says, for example"),
        ({"hidden_size": "x"}, ""),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ""),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_named(
    fields: dict[str, Any], expected: str, folder: Path
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    said = refusal(lambda: load_runner(str(folder), LoadOptions(device="cpu")))
    assert expected in said
    assert str(folder) in said or "llama" in said


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer_config.json", "tokenizer.json"])
def test_deep_nesting_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text(NESTED)
    load = loads(folder)[1 if "tokenizer" in name else 0]
    assert str(folder) in refusal(load)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"version": "9"}, "Unknown tokenizer version '9'"),
        ({"model": {"type": "X"}}, "did not match any variant"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    ],
    ids=["version", "model", "panic"],
)
def test_a_tokenizer_that_the_library_cannot_read_is_refused(
    part: dict[str, Any], expected: str, folder: Path
) -> None:
    """The library raises plain Exceptions, and panics."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    said = refusal(loads(folder)[1])
    assert said.startswith(f"{folder} has no usable tokenizer: ")
    assert expected in said


def test_tables_of_positions_are_no_longer_than_the_cache(folder: Path) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "max_position_embeddings": 10**12}
    file.write_text(json.dumps(config))
    options = LoadOptions(device="cpu", kv_cache_memory=2**20, max_num_seqs=2)
    runner = load_runner(str(folder), options)
    assert runner.max_model_len <= runner.kv_layout.num_blocks * runner.kv_layout.block_size


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("generation_config.json", '{"eos_token_id": [[1]]}', "eos_token_id: [1] is no token id"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: 'x' is no token id"),
        ("generation_config.json", "[1]", ""),
        ("generation_config.json", NESTED, "impossible sizes"),
        ("generation_config.json", '{"cache_implementation": "x"}', "cache_implementation"),
        ("config.json", '{"model_type": "llama", "text_config": {"a": 1}}', ""),
    ],
)
def test_settings_of_a_wrong_kind_are_refused(
    name: str, content: str, expected: str, folder: Path
) -> None:
    """Also where an inference server computes, and only the settings are read."""
    (folder / name).write_text(content)
    for load in (loads(folder)[0], loads(folder)[2]):
        assert expected in refusal(load)


@pytest.mark.parametrize("name", ["x" * 5000 + ".safetensors", "a\x1b[2J\n.safetensors"])
def test_a_shard_that_no_file_can_be_is_refused(name: str, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert "only safetensors files beside it are read" in refusal(loads(folder)[0])


def test_a_link_to_itself_hinders_nothing(folder: Path) -> None:
    expected = read(folder)
    (folder / "merges.txt").symlink_to("merges.txt")
    assert read(folder) == expected


def test_a_gguf_file_of_endless_layers_is_refused(tmp_path: Path) -> None:
    content = (FILES / "qwen3-q8_0.gguf").read_bytes()
    at = content.index(b"qwen3.block_count") + len(b"qwen3.block_count") + 4
    file = tmp_path / "endless.gguf"
    file.write_bytes(content[:at] + (2**31).to_bytes(4, "little") + content[at + 4 :])
    assert "its block_count is 2147483648, more than its" in refusal(loads(file)[0])


def test_damaged_settings_are_refused_or_harmless(folder: Path, seed: int) -> None:
    """Whatever the values are: nothing but a refusal of one sentence ends a load."""
    draw = random.Random(seed)
    values = [0, -1, 1.5, 10**12, 2**63, None, True, "", "x", [], {}, [0], {"a": 1}, float("nan")]
    whole = json.loads((folder / "config.json").read_text())
    said: list[str] = []
    for _ in range(30):
        config = {**whole}
        for _ in range(draw.choice([1, 1, 2])):
            config[draw.choice([*whole])] = draw.choice(values)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / INDEX).unlink(missing_ok=True)
        if draw.random() < 0.3:
            broken = draw.choice([{"weight_map": draw.choice(values)}, [], draw.choice(values)])
            (folder / INDEX).write_text(json.dumps(broken))
        try:
            load_model(str(folder), device=CPU)
        except (ModelError, ConfigurationError) as error:
            said.append(str(error))
    assert said
    assert not [it for it in said if "\n" in it]


def test_a_member_that_an_index_lacks_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    weights = dict.fromkeys(
        load_file(folder / "model-00001.safetensors"), "model-00001.safetensors"
    )
    (folder / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ModelError, match="do not load: 'metadata' is missing in its files"):
        load_model(str(folder), device=CPU)


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (float("nan"), "float32", "holds NaN or infinity; its files are damaged, fetch them again"),
        (1e6, "float16", "is too large for float16; use --dtype bfloat16 or float32"),
    ],
)
def test_weights_that_are_no_numbers_are_named(
    value: float, dtype: Any, expected: str, folder: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name][0, 0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    options = LoadOptions(device="cpu", dtype=dtype)
    said = refusal(lambda: load_runner(str(folder), options))
    assert said == f"llama: logits are not finite: the weight {name} {expected}"


@pytest.mark.parametrize(
    ("factor", "dtype", "native", "said"),
    [
        *(
            (1e4, "float16", native, "in float16; use --dtype bfloat16 or float32")
            for native in (True, False)
        ),
        (1e30, "float32", True, "even in float32; its files are damaged, fetch them again"),
    ],
)
def test_activations_that_overflow_are_refused(
    factor: float, dtype: Any, native: bool, said: str, folder: Path
) -> None:
    """In fp16 this may be the format's fault; in fp32 it is the files'."""
    weights = load_file(folder / "model.safetensors")
    for name in ("gate", "up"):
        weights[f"model.layers.0.mlp.{name}_proj.weight"] *= factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if dtype == "float16":
        load_runner(str(folder), LoadOptions(device="cpu", dtype="float32", native=native))
    options = LoadOptions(device="cpu", dtype=dtype, native=native)
    refused = refusal(lambda: load_runner(str(folder), options))
    assert refused == f"llama: logits are not finite: its numbers overflow {said}"
