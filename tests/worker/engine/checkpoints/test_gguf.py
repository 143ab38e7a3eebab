"""What is read of a GGUF file without its weights: settings, tokenizer, and no vocabulary twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from promptq.worker.engine.checkpoints.files import open_files
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.engine.checkpoints.test_formats import FILES
from tests.worker.engine.checkpoints.test_refused import rewritten


@pytest.mark.parametrize("name", ["small-q8_0.gguf", "qwen3-q8_0.gguf"])
def test_settings_are_those_that_the_library_reads(name: str) -> None:
    theirs = AutoConfig.from_pretrained(FILES, gguf_file=name).to_dict()
    ours = open_files(str(FILES / name)).config.to_dict()
    added = {"head_dim", "dtype", "eos_token_id"}
    about_tokens_and_names = {"pad_token_id", "_name_or_path", "_model_name_or_path"}
    differing = {key for key in theirs | ours if theirs.get(key) != ours.get(key)}
    assert differing <= added | about_tokens_and_names
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
