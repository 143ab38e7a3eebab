"""The tokenizer that comes with a model."""

from __future__ import annotations

import logging

import pytest

from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.tokenizer import HuggingFaceTokenizer


def test_the_library_does_not_warn_of_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are too long are refused, and it would say that they run."""
    logger, said = logging.getLogger("transformers.tokenization_utils_base"), []
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    assert len(HuggingFaceTokenizer.load(str(MODEL_DIR)).encode_text("x " * 5_000)) > 2_048
    assert said == []
