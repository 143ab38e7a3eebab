"""The tokenizer that comes with a model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Request
from promptq.worker.leases.rows import prompt_texts
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.tokenizer import HuggingFaceTokenizer


def test_the_library_does_not_warn_of_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are too long are refused, but the library would warn that they run."""
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


SLOW_EXPRESSION = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
"""An expression that takes exponential time, so the library panics at a limit."""


@pytest.mark.parametrize("field", ["prompt", "messages", "output_prefix", "bad_words"])
def test_a_text_at_which_the_library_panics_is_refused(tmp_path: Path, field: str) -> None:
    folder = Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))
    file = folder / "tokenizer.json"
    settings = {**json.loads(file.read_text()), "pre_tokenizer": SLOW_EXPRESSION}
    file.write_text(json.dumps(settings))
    tokenizer, text = HuggingFaceTokenizer.load(str(folder)), "a" * 40 + "b"

    def encode() -> Any:
        if field == "output_prefix":
            return tokenizer.encode_output(text)
        if field == "bad_words":
            return tokenizer.encode_words([text])
        messages = [{"role": "user", "content": text}]
        given = {"prompt": text} if field == "prompt" else {"messages": messages}
        return tokenizer.encode_prompt(Request.model_validate(given))

    with pytest.raises(InvalidRequestError, match=f"^{field}: the model's tokenizer fails at this"):
        encode()
