"""Vectors over HTTP, by OpenAI's own client: inputs of all forms, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
from openai import OpenAI

from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.request import FinishReason
from tests.producer.gateway.living import LiveGateway, error_of, sent
from tests.producer.playing import KEYS, HandWorker
from tests.support.waiting import until

TEXTS = ["A fox in the snow", "Once upon a time", "The old baker"]


def vectors(client: OpenAI, given: Any, **fields: Any) -> np.ndarray[Any, Any]:
    """Asked for as numbers, and in the order of their indices."""
    fields = {"model": "", "encoding_format": "float", **fields}
    got = client.embeddings.create(input=given, **fields)
    assert [it.index for it in got.data] == list(range(len(got.data)))
    return np.array([it.embedding for it in got.data])


def test_one_input_or_several_as_text_or_token_ids(stories: OpenAI) -> None:
    """Each vector is the same to the last bit whatever it is asked with, and of length 1."""
    several = vectors(stories, TEXTS)
    assert several.shape == (3, 192)
    np.testing.assert_allclose(np.linalg.norm(several, axis=1), 1, atol=1e-6)
    assert np.abs(several[0] - several[1]).max() > 0.01
    for text, vector in zip(TEXTS, several, strict=True):
        np.testing.assert_array_equal(vectors(stories, text), [vector])
    np.testing.assert_array_equal(vectors(stories, [[7, 8], [9]])[0], vectors(stories, [7, 8])[0])


def test_numbers_or_base64(stories: OpenAI, stories_gateway: LiveGateway) -> None:
    body = {"input": TEXTS[:2], "encoding_format": "base64"}
    answer = httpx2.post(f"{stories_gateway.base_url}/embeddings", json=body, timeout=None).json()
    decoded = [np.frombuffer(base64.b64decode(it["embedding"]), "<f4") for it in answer["data"]]
    np.testing.assert_array_equal(decoded, vectors(stories, TEXTS[:2]).astype(np.float32))
    assert answer["object"] == "list"
    assert {it["object"] for it in answer["data"]} == {"embedding"}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] > 5
    assert answer["model"]


def test_fewer_dimensions_have_length_1_again(stories: OpenAI) -> None:
    whole, short = vectors(stories, TEXTS[0])[0], vectors(stories, TEXTS[0], dimensions=16)[0]
    assert short.shape == (16,)
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    options = {"pooling": "mean", "normalize": False}
    mean = vectors(stories, TEXTS[0], extra_body=options)[0]
    assert np.linalg.norm(mean) > 1.5


WRONG = [
    ({}, "input", "missing"),
    ({"input": ""}, "input", "is empty"),
    ({"input": []}, "input", "is empty"),
    ({"input": ["a", ""]}, "input", "item 1 is empty"),
    ({"input": [["a"]]}, "input", "Input should be a valid"),
    ({"input": [1, -1]}, "input", "greater than or equal to 0"),
    ({"input": ["a"] * 2049}, "input", "2049 inputs are more than the 2048"),
    ({"input": "a " * 3000}, "input", "maximum context length is 2048 tokens"),
    ({"input": [2048]}, "input", "outside the vocabulary"),
    ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"input": "a", "dimensions": 193}, "dimensions", "193 is more than the 192"),
    ({"input": "a", "pooling": "cls"}, "pooling", "'last' or 'mean'"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ({"input": "a", "temperature": 0.5}, "temperature", "is not a field of this endpoint"),
    ({"input": "a", "stream": True}, "stream", "is not a field of this endpoint"),
    ({"input": "a", "dimension": 3}, "dimension", "is not a field"),
]


@pytest.mark.parametrize(("body", "param", "message"), WRONG)
def test_what_is_wrong_is_named(
    stories_gateway: LiveGateway, body: dict[str, Any], param: str, message: str
) -> None:
    answer = httpx2.post(f"{stories_gateway.base_url}/embeddings", json=body, timeout=None)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert message in error["message"]


def test_an_engine_that_makes_none(letters_gateway: LiveGateway) -> None:
    body = {"input": "a"}
    answer = httpx2.post(f"{letters_gateway.base_url}/embeddings", json=body, timeout=None)
    assert error_of(answer) == (400, "unsupported")
    for path in ("completions", "chat/completions"):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "embed": {}}
        body.pop("messages" if path == "completions" else "prompt")
        answer = httpx2.post(f"{letters_gateway.base_url}/{path}", json=body, timeout=None)
        assert answer.json()["error"]["param"] == "embed"


def test_several_inputs_are_enqueued_all_or_none(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    own_worker.redis.hset(KEYS.config, "max_pending", 2)
    answer = http.post("/v1/embeddings", json={"input": TEXTS})
    assert error_of(answer) == (429, "queue_full")
    assert own_worker.queue.is_empty()


VECTORS = {
    "none": None,
    "not base64": "?",
    "half a number": base64.b64encode(b"abc").decode(),
    "a NaN": base64.b64encode(np.array([1, np.nan], "<f4").tobytes()).decode(),
    "an infinity": base64.b64encode(np.array([np.inf], "<f4").tobytes()).decode(),
}


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("kind", VECTORS)
def test_a_record_that_is_no_vector_is_named_as_such(
    http: httpx2.Client, own_worker: HandWorker, kind: str, encoding: str
) -> None:
    """A stranger wrote the record, so this is no fault of the gateway (500)."""
    with ThreadPoolExecutor() as beside:
        body = {"input": "a", "encoding_format": encoding}
        asking = beside.submit(lambda: http.post("/v1/embeddings", json=body))
        claim = own_worker.take_next()
        own_worker.send(claim, "", FinishReason.STOP, embedding=VECTORS[kind])
        assert error_of(asking.result()) == (409, "spoilt_record")


def test_a_client_that_leaves_cancels(
    start_gateway: Callable[..., LiveGateway], own_worker: HandWorker
) -> None:
    body = json.dumps({"input": TEXTS, "priority": -3}).encode()
    with sent(start_gateway(), "/v1/embeddings", body, {}):
        until(own_worker.queue.count)
    until(own_worker.queue.is_empty)
    keys = own_worker.redis.keys("*:request:embd-*")
    assert {own_worker.redis.hget(key, "state") for key in keys} == {b"cancelled"}
    payloads = [json.loads(own_worker.redis.hget(key, "payload")) for key in keys]
    assert sorted(it["prompt"] for it in payloads) == sorted(TEXTS)
    assert all(it["embed"] == {} and it["priority"] == -3 for it in payloads)


def test_an_input_that_fails_cancels_the_others(
    http: httpx2.Client, own_worker: HandWorker
) -> None:
    error = ErrorInfo(type="internal_error", message="it failed")
    with ThreadPoolExecutor() as beside:
        asking = beside.submit(lambda: http.post("/v1/embeddings", json={"input": TEXTS}))
        claim = own_worker.take_next()
        own_worker.send(claim, "", FinishReason.ERROR, error=error)
        assert asking.result().status_code == 500
    until(own_worker.queue.is_empty)
    keys = own_worker.redis.keys("*:request:embd-*")
    states = sorted(own_worker.redis.hget(key, "state") for key in keys)
    assert states == [b"cancelled"] * (len(TEXTS) - 1) + [b"failed"]


SCORES = {"A fox": -0.5, "the snow": 2.5, "an old baker": 0.25}


@pytest.mark.parametrize(
    "documents", [[*SCORES], [{"text": text, "title": "1"} for text in SCORES]], ids=str
)
def test_documents_are_sorted_by_their_scores(
    http: httpx2.Client, own_worker: HandWorker, documents: list[Any]
) -> None:
    body: dict[str, Any] = {"query": "weather", "documents": documents, "return_documents": True}
    ranked = [(1, "the snow"), (2, "an old baker"), (0, "A fox")]
    for more, num_shown in (({}, 3), ({"top_n": 2, "model": ""}, 2)):
        with ThreadPoolExecutor() as beside:
            asking = beside.submit(lambda more=more: http.post("/v1/rerank", json=body | more))
            send_scores(own_worker, len(SCORES))
            answer = asking.result().json()
        assert answer["id"].startswith("rerank-")
        assert answer["results"] == [
            {"index": index, "document": {"text": text}, "relevance_score": SCORES[text]}
            for index, text in ranked[:num_shown]
        ]
        assert "prompt_tokens" in answer["usage"]


def send_scores(worker: HandWorker, num_texts: int) -> None:
    """Serves the next requests, which compare texts with `weather`."""
    for _ in range(num_texts):
        claim = worker.take_next()
        payload = worker.payload(claim.request_id)
        assert payload["embed"] == {"query": "weather"}
        score = np.array([SCORES[payload["prompt"]]], "<f4").tobytes()
        vector = base64.b64encode(score).decode()
        worker.send(claim, "", FinishReason.STOP, embedding=vector)


@pytest.mark.parametrize("texts", [[*SCORES], "the snow"], ids=str)
def test_scores_come_in_the_order_of_the_texts(
    http: httpx2.Client, own_worker: HandWorker, texts: list[str] | str
) -> None:
    body = {"text_1": "weather", "text_2": texts}
    wanted = [texts] if isinstance(texts, str) else texts
    with ThreadPoolExecutor() as beside:
        asking = beside.submit(lambda: http.post("/v1/score", json=body))
        send_scores(own_worker, len(wanted))
        answer = asking.result().json()
    assert answer["id"].startswith("score-")
    assert answer["data"] == [
        {"index": index, "object": "score", "score": SCORES[text]}
        for index, text in enumerate(wanted)
    ]
    assert answer["usage"]["prompt_tokens"] == 3 * len(wanted)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"text_2": "a"}, "text_1", "missing"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, "text_1", "should be a valid string"),
        ({"text_1": "a", "text_2": []}, "text_2", "is empty"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2", "item 1 is empty"),
    ],
)
def test_what_is_wrong_with_a_score_is_named(
    http: httpx2.Client, body: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post("/v1/score", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


WRONG_RERANKS = [
    ({"documents": ["a"]}, "query", "missing"),
    ({"query": "", "documents": ["a"]}, "query", "at least 1 character"),
    ({"query": "a", "documents": []}, "documents", "is empty"),
    ({"query": "a", "documents": ["b", {}]}, "documents", "item 1 is empty"),
    ({"query": "a", "documents": [{"text": 7}]}, "documents", "should be a valid string"),
    ({"query": "a", "documents": ["b"] * 2049}, "documents", "more than the 2048"),
    ({"query": "a" * 2**20, "documents": ["b"] * 40}, "documents", "more than the 33554432"),
    ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "greater than or equal to 1"),
    ({"query": "a", "documents": ["b"], "max_tokens": 1}, "max_tokens", "not a field of this"),
    ({"query": "a", "documents": ["b"]}, "query", "no live worker's engine serves scores"),
]


@pytest.mark.parametrize(("body", "param", "message"), WRONG_RERANKS)
def test_what_is_wrong_with_a_rerank_is_named(
    stories_gateway: LiveGateway, body: dict[str, Any], param: str, message: str
) -> None:
    answer = httpx2.post(f"{stories_gateway.base_url}/rerank", json=body, timeout=None)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
