"""Reads a GGUF file's metadata and tokenizer; its vocabulary is not read twice."""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer

from promptq.shared.errors import ModelError, ModelNotFoundError
from promptq.worker.engine.model.loading import open_files
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.engine.checkpoints.test_formats import FILES
from tests.worker.engine.checkpoints.test_refused import rewritten


@pytest.mark.parametrize("name", ["small-q8_0.gguf", "qwen3-q8_0.gguf"])
def test_settings_are_those_that_the_library_reads(name: str) -> None:
    theirs = AutoConfig.from_pretrained(FILES, gguf_file=name).to_dict()
    ours = open_files(str(FILES / name)).config.to_dict()
    added = {"head_dim", "dtype", "eos_token_id"}
    unused = {"bos_token_id", "pad_token_id", "_name_or_path", "_model_name_or_path"}
    differing = {key for key in theirs | ours if theirs.get(key) != ours.get(key)}
    assert differing <= added | unused
    assert ours["vocab_size"] == 288


@pytest.mark.parametrize("name", ["small-q8_0.gguf", "qwen3-q8_0.gguf"])
def test_the_tokenizer_is_that_of_the_library(name: str) -> None:
    ours, theirs = (
        HuggingFaceTokenizer.load(str(FILES / name)),
        HuggingFaceTokenizer(AutoTokenizer.from_pretrained(FILES, gguf_file=name)),
    )
    for text in ("The quick brown fox", "naïve 日本語 42\n\n  x", "<s>a</s> <|im_end|>"):
        for special in (False, True):
            ids = ours.encode_text(text, add_special_tokens=special)
            assert ids == theirs.encode_text(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids)


def test_the_size_of_the_vocabulary_costs_nothing(tmp_path: Path) -> None:
    """Python calls are counted: the libraries make several for each element of an array."""

    def num_calls(num_tags: int) -> int:
        tags = [f"tag {each}" for each in range(num_tags)]
        more = {"general.tags": tags, "general.numbers": list(range(num_tags))}
        file = rewritten(FILES / "small-q8_0.gguf", tmp_path / f"{num_tags}.gguf", **more)
        counted = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            open_files(str(file))
        finally:
            sys.setprofile(None)
        return counted

    num_calls(1)  # caches fill
    assert abs(num_calls(5_000) - num_calls(10)) < 1_000


def test_another_tokenizer_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    file = shutil.copy(FILES / "small-q8_0.gguf", tmp_path / "m.gguf")
    whole = HuggingFaceTokenizer.load(str(file)).encode_text("The quick brown fox")
    model = models.WordLevel({"[UNK]": 0, "fox": 1}, unk_token="[UNK]")
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert HuggingFaceTokenizer.load(str(file)).encode_text("The quick brown fox") == whole


def file_of(to: Path, *fields: tuple[bytes, int, bytes]) -> Path:
    """A file of these fields (name, kind, value) and without tensors."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    for name, kind, value in fields:
        content += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    to.write_bytes(content)
    return to


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


STRING, UINT32, ARRAY = 8, 4, 9
LLAMA = (b"general.architecture", STRING, text(b"llama"))
TOKENS = (b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"a") + text(b"b"))


def test_fields_of_a_wrong_kind_are_named(tmp_path: Path) -> None:
    """A default in their place would be another model."""
    source = FILES / "qwen3-q8_0.gguf"
    for name, value, said in (
        ("qwen3.rope.freq_base", [1.0], "its qwen3.rope.freq_base is an array"),
        ("qwen3.attention.head_count_kv", [2], "its qwen3.attention.head_count_kv is an array"),
        ("tokenizer.ggml.eos_token_id", [2], "its tokenizer.ggml.eos_token_id is an array"),
        ("qwen3.attention.scale", float("nan"), "attention.scale is nan, which is not supported"),
        ("qwen3.embedding_length", 1.5, "for field 'hidden_size': .*1.5"),
    ):
        file = rewritten(source, tmp_path / "wrong.gguf", **{name: value})
        with pytest.raises(ModelError, match=f"wrong.gguf: .*{said}"):
            open_files(str(file))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([LLAMA], "it has neither an embedding nor tokens"),
        ([TOKENS], "it does not name its architecture"),
        (
            [(b"general.architecture", ARRAY, struct.pack("<IQ", 4, 0)), TOKENS],
            "its general.architecture is an array",
        ),
        ([LLAMA, (b"x", ARRAY, struct.pack("<IQ", ARRAY, 1))], "it has an array of arrays"),
        ([LLAMA, (b"x", ARRAY, struct.pack("<IQ", UINT32, 2**40))], "it ends within an array"),
        (
            [LLAMA, (b"x", ARRAY, struct.pack("<IQ", STRING, 2**60))],
            "requires a buffer of",
        ),
        ([LLAMA, TOKENS, (b"split.count", UINT32, b"")], "or is incomplete: "),
        (
            [LLAMA, TOKENS, (b"llama.block_count", STRING, text(b"\xff"))],
            "its settings cannot be read",
        ),
        (
            [LLAMA, TOKENS, (b"llama.block_count", STRING, text(b"many"))],
            "its settings cannot be read",
        ),
    ],
)
def test_a_header_that_is_damaged_is_named(
    tmp_path: Path, fields: list[tuple[bytes, int, bytes]], said: str
) -> None:
    file = file_of(tmp_path / "broken.gguf", *fields)
    with pytest.raises(ModelError, match=f"broken.gguf: .*{said}"):
        open_files(str(file))


def test_an_end_token_that_is_none_is_named(tmp_path: Path) -> None:
    file = rewritten(
        FILES / "small-q8_0.gguf", tmp_path / "m.gguf", **{"tokenizer.ggml.eos_token_id": 4_000}
    )
    with pytest.raises(ModelNotFoundError, match="has no usable tokenizer: "):
        HuggingFaceTokenizer.load(str(file))
