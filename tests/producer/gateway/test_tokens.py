"""Texts as tokens, and tokens as texts, by the worker's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from transformers import AutoTokenizer

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Request
from promptq.worker.shipped import MODEL_DIR
from tests.producer.gateway.living import LiveGateway

TEXT = "Once upon a time, the caf\u00e9 \U0001f98a"
CHAT = [{"role": "user", "content": "Tell me of a fox"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def asking(stories_gateway: LiveGateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=stories_gateway.url, timeout=60) as client:
        yield client


def test_the_tokens_of_a_text(asking: httpx2.Client, tokenizer: Any) -> None:
    told = asking.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer(TEXT)["input_ids"]
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 2048
    assert "".join(told["token_strs"]) == TEXT


def test_the_tokens_of_a_chat(asking: httpx2.Client, tokenizer: Any) -> None:
    told = asking.post("/tokenize", json={"messages": CHAT}).json()
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert told["tokens"] == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert told["token_strs"] is None


def test_the_text_of_tokens(asking: httpx2.Client, tokenizer: Any) -> None:
    tokens = tokenizer(TEXT)["input_ids"]
    assert asking.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": TEXT}


def test_they_count_as_many_as_the_prompt_of_an_answer(asking: httpx2.Client) -> None:
    count = asking.post("/tokenize", json={"messages": CHAT}).json()["count"]
    body = {"messages": CHAT, "max_tokens": 1}
    usage = asking.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == count


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/tokenize", {}, 400, "prompt: exactly one of prompt and messages is needed"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt: exactly one of"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model: "),
        ("/tokenize", {"prompt": "a b c d " * 9000}, 400, "maximum context length is 2048"),
        ("/detokenize", {"tokens": []}, 400, "tokens: "),
        ("/detokenize", {"tokens": [10**9]}, 400, "token id 1000000000 is outside the vocabulary"),
    ],
)
def test_errors_are_reported(
    asking: httpx2.Client, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    answer = asking.post(path, json=body)
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]


def test_an_engine_without_a_model_reports_its_tokens_too(letters_gateway: LiveGateway) -> None:
    with httpx2.Client(base_url=letters_gateway.url, timeout=60) as client:
        told = client.post("/tokenize", json={"prompt": "Hi"}).json()
    assert told["tokens"] == [72, 105]


@pytest.mark.parametrize(
    "field", [{"max_tokens": 3}, {"logprobs": 1}, {"output_prefix": {"text": "a"}}]
)
def test_fields_of_an_answer_have_no_meaning(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="has no meaning with tokenize"):
        Request.build({"prompt": "a", "tokenize": True, **field})
