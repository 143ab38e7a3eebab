"""The tokenizer that comes with a model."""

from __future__ import annotations

import logging

import pytest
from transformers import ByT5Tokenizer

from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.detokenizer import prompt_texts
from promptq.worker.text.tokenizer import HuggingFaceTokenizer


def test_the_library_does_not_warn_of_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are too long are refused, and it would say that they run."""
    logger, said = logging.getLogger("transformers.tokenization_utils_base"), []
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    assert len(HuggingFaceTokenizer.load(str(MODEL_DIR)).encode_text("x " * 5_000)) > 2_048
    assert said == []


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_ids_beyond_the_tokenizer_are_no_text(kind: str) -> None:
    """Many models have more rows than tokens."""
    if kind == "fast":
        tokenizer = HuggingFaceTokenizer.load(str(MODEL_DIR))
    else:
        tokenizer = HuggingFaceTokenizer(ByT5Tokenizer())
    beyond = [tokenizer.num_tokens, 10**6]
    cat = tokenizer.encode_text("cat")
    assert prompt_texts(tokenizer, [*cat, *beyond, *cat]) == [
        *prompt_texts(tokenizer, cat), "", "", *prompt_texts(tokenizer, cat),
    ]  # fmt: skip
    assert tokenizer.decode([*cat, *beyond, *cat]) == "catcat"
    assert tokenizer.decoder(["no mark"])([*cat, *beyond, *cat]) == "catcat"
    end = tokenizer.end_token_id
    assert end is not None
    assert tokenizer.token_text(end) in ("<|im_end|>", "</s>")
