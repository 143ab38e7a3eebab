"""What transformers answers with the shipped model in fp32."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from promptq.worker.shipped import MODEL_DIR
from tests.worker.engine.tiny_models import generate

_LOCK = threading.Lock()
"""transformers cannot load a model in two threads: one of them would get random weights."""


@cache
def _loaded() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(MODEL_DIR)


@cache
def _tokens(prompt: str, num_tokens: int) -> tuple[int, ...]:
    model, tokenizer = _loaded()
    return tuple(generate(model, tokenizer.encode(prompt), num_tokens))


def undisturbed(prompt: str, num_tokens: int) -> list[int]:
    """The greedy tokens, with the end token if one comes."""
    with _LOCK:
        ends = _loaded()[0].generation_config.eos_token_id
        tokens = [*_tokens(prompt, num_tokens)]
    for number, token_id in enumerate(tokens, 1):
        if token_id in ends:
            return tokens[:number]
    return tokens
