"""Completions and chats through OpenAI's own client, on the model-free engine."""

from __future__ import annotations

import openai

from tests.helpers import text_of
from worker.service import Worker


def test_a_completion(client: openai.OpenAI, letters: Worker) -> None:
    got = client.completions.create(model="model-free", prompt="Once", max_tokens=7, seed=3)
    [choice] = got.choices
    assert choice.text == text_of(3, 7)
    assert choice.finish_reason == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (4, 7)
