"""Texts become vectors through Redis and real workers in fp32, equal to the library's own."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from promptq import AsyncClient, Client
from promptq.producer.batches.local_batch import errors_beside, run_batch
from promptq.shared.errors import ConfigurationError, InvalidRequestError, RequestFailedError
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.checkpoints.configurations import pooling_of
from promptq.worker.serve.build import Served, build
from promptq.worker.shipped import MODEL_DIR
from tests.producer.playing import PROMPTQ
from tests.support.model_free import finished, running_worker
from tests.support.processes import run, started
from tests.support.requests import async_log_of, async_put, put_plainly, until_active
from tests.support.roles import as_role
from tests.support.waiting import async_until
from tests.worker.engine.tiny_models import make_model

TEXTS = ["Once upon a time", "A fox.", "There was an old baker who loved the snow " * 9]
POOLINGS: list[Any] = ["last", "mean"]
LONG = [5 + place % 700 for place in range(600)]


@pytest.fixture(scope="module")
def served() -> Served:
    """The shipped model in fp32, in whose prefill there are many steps."""
    return build(WorkerSettings(dtype="float32", max_num_seqs=4, prefill_chunk=2))


@torch.inference_mode()
def expected(
    directory: Path, prompt: str | list[int], pooling: str = "last", size: int | None = None
) -> list[float]:
    """Returns the vector that sentence-transformers makes: pooled, cut, then of length 1."""
    model: Any = AutoModel.from_pretrained(directory, dtype=torch.float32)
    if isinstance(prompt, str):
        prompt = AutoTokenizer.from_pretrained(directory)(prompt)["input_ids"]
    states = model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = states[-1] if pooling == "last" else states.mean(dim=0)
    vector: list[float] = torch.nn.functional.normalize(pooled[:size], dim=0).tolist()
    return vector


async def test_vectors_from_every_client(redis_url: str, served: Served) -> None:
    """Of one text or several, beside a stream, and from the command line."""
    async with running_worker(redis_url, served), AsyncClient(redis_url) as client:
        stream = await client.enqueue("Once", max_tokens=200, ignore_eos=True)
        for pooling in POOLINGS:
            found = await client.embed(TEXTS, pooling=pooling)
            wanted = [expected(MODEL_DIR, text, pooling) for text in TEXTS]
            np.testing.assert_allclose(found.vectors, wanted, atol=1e-5)
            assert found.usage.completion_tokens == 0
            assert found.usage.prompt_tokens > 50
        first = expected(MODEL_DIR, TEXTS[0])
        token_ids = AutoTokenizer.from_pretrained(MODEL_DIR)(TEXTS[0])["input_ids"]
        [vector] = (await client.embed(token_ids, dimensions=64)).vectors
        np.testing.assert_allclose(vector, expected(MODEL_DIR, token_ids, size=64), atol=1e-5)
        [bare] = (await client.embed(TEXTS[0], normalize=False)).vectors
        assert np.linalg.norm(bare) > 2
        np.testing.assert_allclose(bare / np.linalg.norm(bare), first, atol=1e-5)
        told = await asyncio.to_thread(embedded_beside, redis_url)
        np.testing.assert_allclose(told, [first, expected(MODEL_DIR, TEXTS[1])], atol=1e-5)
        assert (await client.result(stream)).usage.completion_tokens == 200


def embedded_beside(url: str) -> list[list[float]]:
    """Vectors of the first text by the synchronous client, and of the second by the command."""
    with Client(url) as client:
        [first] = client.embed(TEXTS[0]).vectors
    done = run(*PROMPTQ, "embed", TEXTS[1], "--redis", url)
    return [first, json.loads(done.stdout)]


async def test_the_last_event_and_the_result_have_the_vector(
    redis_url: str, queue: AsyncRequestQueue, served: Served
) -> None:
    """A client that has nothing but the protocol reads the vector."""
    payload = json.dumps({"prompt": TEXTS[0], "embed": {"pooling": "mean"}})
    async with running_worker(redis_url, served):
        with redis.Redis.from_url(as_role("", redis_url)) as plain:
            put_plainly(plain, Client(plain).queue, "mine", 1.0, payload)
        result = await finished(queue, "mine")
        [event] = await async_log_of(queue, "mine")
    assert event["embedding"] == result["embedding"]
    assert (event["finish_reason"], event["token_ids"], event["text"]) == ("stop", [], "")
    assert event["usage"]["completion_tokens"] == 0
    vector = struct.unpack("<192f", base64.b64decode(event["embedding"]))
    np.testing.assert_allclose(vector, expected(MODEL_DIR, TEXTS[0], "mean"), atol=1e-5)
    outputs = await queue.redis.exists("promptq:{default}:outputs")
    assert not outputs, "what answers are expected to need does not shrink"


async def test_a_cancel_in_the_prefill_frees_the_kv(
    redis_url: str, queue: AsyncRequestQueue, served: Served
) -> None:
    async with running_worker(redis_url, served) as worker:
        request_id = await async_put(queue, prompt=LONG, embed={})
        await async_until(lambda: worker.served.engine.stats.num_used_blocks)
        await queue.cancel(request_id)
        result = await finished(queue, request_id)
        assert (result["finish_reason"], result.get("embedding")) == ("cancelled", None)
        await async_until(lambda: not worker.served.engine.stats.num_used_blocks)


async def test_another_worker_finishes_what_a_killed_one_began(
    redis_url: str, queue: AsyncRequestQueue, served: Served, tmp_path: Path
) -> None:
    slow = ("--dtype", "float32", "--prefill-chunk", "1", "--lease-ms", "1500", "--pooling", "mean")
    with started(tmp_path, redis_url, *slow) as worker:
        request_id = await async_put(queue, prompt=LONG, embed={})
        await until_active(queue, request_id)
        worker.process.kill()
        worker.wait()
    assert await async_log_of(queue, request_id) == []
    other = running_worker(redis_url, replace(served, pooling="mean"), lease_ms=1500)
    async with other, AsyncClient(redis_url) as client:
        result = await client.result(request_id)
    assert result.stats is not None
    assert result.stats.attempts == 2
    np.testing.assert_allclose(result.vector, expected(MODEL_DIR, LONG, "mean"), atol=1e-5)


WRONG = [
    (
        {"embed": {"pooling": "max"}},
        "embed: pooling: Input should be 'last' or 'mean', got \"max\"",
    ),
    ({"embed": {"dimensions": 0}}, "embed: dimensions: Input should be .* equal to 1, got 0"),
    ({"embed": {"poling": "last"}}, "embed: has no field 'poling'"),
    ({"embed": True}, "embed: Input should be"),
    ({"embed": {}, "prompt": ""}, "prompt: is empty"),
    ({"embed": {}, "temperature": 0.5}, "temperature: has no meaning with embed"),
    ({"embed": {}, "max_tokens": 5}, "max_tokens: has no meaning with embed"),
    ({"embed": {}, "logprobs": 0}, "logprobs: has no meaning with embed"),
    ({"embed": {}, "prompt": None, "messages": [{"role": "user"}]}, "messages: has no meaning"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_fields_are_named(redis_url: str, fields: dict[str, Any], message: str) -> None:
    with Client(redis_url) as client, pytest.raises(InvalidRequestError, match="^" + message):
        client.enqueue(**{"prompt": "x", **fields})


async def test_what_a_worker_cannot_do_is_refused(redis_url: str, served: Served) -> None:
    async with running_worker(redis_url, served), AsyncClient(redis_url) as client:
        with pytest.raises(RequestFailedError, match="193 is more than the 192 that the"):
            await client.embed("x", dimensions=193)
        with pytest.raises(RequestFailedError, match="at most 2047 can be the prompt"):
            await client.embed([5] * 2048)
    letters = AsyncClient(redis_url, "letters")
    async with running_worker(redis_url, queue="letters"), letters as client:
        with pytest.raises(RequestFailedError, match="embed: no live worker's engine serves it"):
            await client.embed("x")


async def test_a_batch_of_embeddings(redis_url: str, served: Served, tmp_path: Path) -> None:
    """Good lines are answered as by the gateway; others are refused alone, by the field's name."""
    bodies = [{"input": TEXTS}, {"input": TEXTS[0]}, {"input": "a", "dimensions": 999}, {}]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
        for number, body in enumerate(bodies)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    async with running_worker(redis_url, served):
        outcome = await asyncio.to_thread(run_batch, source, output, server=redis_url)
    assert outcome.is_complete
    assert (outcome.progress.completed, outcome.progress.failed) == (2, 2)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    answers = {it["custom_id"]: it["response"]["body"] for it in written}
    assert answers.keys() == {"0", "1"}
    assert [len(it["embedding"]) for it in answers["0"]["data"]] == [192] * 3
    assert answers["0"]["data"][0]["embedding"] == answers["1"]["data"][0]["embedding"]
    refused = [json.loads(line) for line in errors_beside(output).read_text().splitlines()]
    named = {it["custom_id"]: it["response"]["body"]["error"]["param"] for it in refused}
    assert named == {"2": "dimensions", "3": "input"}


def save_model(directory: Path, pooling: dict[str, Any]) -> Path:
    """A tiny model whose tokenizer appends an end token, with a file of sentence-transformers."""
    words = {word: number for number, word in enumerate(["?", "a", "<end>", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A <end>", None, [("<end>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        directory
    )
    make_model("qwen3", 5).save_pretrained(directory)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


async def test_the_models_own_files_say_how_to_pool(redis_url: str, tmp_path: Path) -> None:
    """And its tokenizer says which special tokens a text has."""
    directory = save_model(tmp_path, {"pooling_mode_mean_tokens": True})
    served = build(WorkerSettings(model=str(directory), dtype="float32"))
    async with running_worker(redis_url, served), AsyncClient(redis_url) as client:
        found = await client.embed("a b c")
        assert found.usage.prompt_tokens == 4
        np.testing.assert_allclose(
            found.vectors, [expected(directory, [1, 3, 4, 2], "mean")], atol=1e-5
        )
    unknown = replace(served, pooling=None)
    async with running_worker(redis_url, unknown), AsyncClient(redis_url) as client:
        with pytest.raises(RequestFailedError, match="a pooling that this worker does not support"):
            await client.embed("a b c")
        await client.embed("a b c", pooling="last")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
    ],
)
def test_files_of_sentence_transformers(
    config: dict[str, Any], pooling: str | None, tmp_path: Path
) -> None:
    assert pooling_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert pooling_of(tmp_path) == pooling
    (tmp_path / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="--pooling"):
        pooling_of(tmp_path)
