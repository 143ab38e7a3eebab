"""A worker serves vectors that an inference server for pooling computes."""

from __future__ import annotations

import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from promptq.shared.protocol.request import SamplingParams
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.upstream.dialects.vllm import VllmDialect
from tests.programs.stand_in_server.starting import StandIn, stand_in_server
from tests.programs.stand_in_server.vllm import vector_of
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put
from tests.support.waiting import async_until
from tests.worker.upstream.test_watched_streams import served

PROMPT = "a fox"
VECTOR = np.array(vector_of(PROMPT.encode()))


@pytest.fixture(params=["vllm", "llama.cpp", "openai"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def stand_in(engine: str) -> Iterator[StandIn]:
    with stand_in_server("vllm" if engine == "openai" else engine, "--pooling") as server:
        yield server


def raw(engine: str) -> dict[str, Any]:
    """Returns the options for the vector that the server computes."""
    return {} if engine == "openai" else {"normalize": False}


def assert_vector(result: Any, engine: str) -> None:
    """Asserts that a result with the options `raw` is right."""
    if engine == "openai":  # its server always normalises
        assert numbers(result) == pytest.approx(VECTOR / np.linalg.norm(VECTOR), rel=1e-6)
    else:
        assert numbers(result).tolist() == VECTOR.tolist()


async def embedded(queue: AsyncRequestQueue, **embed: Any) -> Any:
    return await finished(queue, await async_put(queue, prompt=PROMPT, embed=embed))


def numbers(result: Any) -> Any:
    return np.frombuffer(b64decode(result["embedding"]), "<f4")


async def test_vectors_come_through_the_queue(
    redis_url: str, queue: AsyncRequestQueue, model: Path, engine: str, stand_in: StandIn
) -> None:
    here = await served(engine, stand_in.url, model)
    assert here.engine.limits.embedding_size == len(VECTOR)
    async with running_worker(redis_url, here):
        plain = await embedded(queue, **raw(engine))
        assert_vector(plain, engine)
        assert plain["finish_reason"] == "stop"
        assert plain["usage"]["prompt_tokens"] == len(PROMPT)
        whole = numbers(await embedded(queue, pooling="last"))
        assert whole == pytest.approx(VECTOR / np.linalg.norm(VECTOR), rel=1e-6)
        short = numbers(await embedded(queue, dimensions=2))
        assert short == pytest.approx(VECTOR[:2] / np.linalg.norm(VECTOR[:2]), rel=1e-6)


async def test_what_such_a_server_does_not_do_is_refused_by_name(
    redis_url: str, queue: AsyncRequestQueue, model: Path, engine: str, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served(engine, stand_in.url, model)):
        text = await finished(queue, await async_put(queue, prompt=PROMPT, max_tokens=3))
        for error in (text["error"], (await embedded(queue, pooling="mean"))["error"]):
            assert error["type"] == "unsupported"
            assert error["message"].startswith("embed: ")
        if engine == "openai":
            error = (await embedded(queue, normalize=False))["error"]
            assert error["type"] == "unsupported"
            assert error["message"].startswith("embed: ")
        tokens = await finished(queue, await async_put(queue, prompt=PROMPT, tokenize=True))
        assert tokens["prompt_token_ids"] == [*PROMPT.encode()]


async def test_a_vector_that_is_no_number_ends_its_request_alone(
    redis_url: str, queue: AsyncRequestQueue, model: Path, engine: str, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served(engine, stand_in.url, model)):
        stand_in.fail("spoil")
        error = (await embedded(queue))["error"]
        assert "no vector of 4 finite numbers" in error["message"]
        stand_in.fail("")
        assert_vector(await embedded(queue, **raw(engine)), engine)


async def test_a_prompt_that_is_too_long_for_the_server_ends_its_request_alone(
    redis_url: str, queue: AsyncRequestQueue, model: Path, engine: str, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served(engine, stand_in.url, model)) as worker:
        stand_in.fail("too_long")
        result = await embedded(queue)
        assert "input (9 tokens) is too large to process" in result["error"]["message"]
        assert ("--ubatch-size" in result["error"]["message"]) is (engine == "llama.cpp")
        assert result["stats"]["attempts"] == 1
        assert worker.engine.is_accepting
        stand_in.fail("")
        assert_vector(await embedded(queue, **raw(engine)), engine)


@pytest.mark.parametrize("fault", ["break", "refuse"])
async def test_a_server_that_fails_gets_the_request_again(
    redis_url: str,
    queue: AsyncRequestQueue,
    model: Path,
    engine: str,
    stand_in: StandIn,
    fault: str,
) -> None:
    async with running_worker(redis_url, await served(engine, stand_in.url, model)) as worker:
        stand_in.fail(fault)
        request_id = await async_put(queue, prompt=PROMPT, embed=raw(engine))
        await async_until(lambda: not worker.engine.is_accepting)
        stand_in.fail("")
        assert_vector(await finished(queue, request_id), engine)


async def test_tenants_have_separate_prefixes() -> None:
    bodies = []

    async def post(path: str, body: Any, seconds: float) -> Any:
        bodies.append(body)
        return {"data": [{"embedding": ""}]}

    server: Any = SimpleNamespace(post=post, idle_seconds=1.0)
    for shares in (False, True):
        dialect = VllmDialect(shares_prefixes=shares)
        for tenant, salt in (("a", ""), ("b", "s"), ("", "")):
            request = EngineRequest(
                0, [1], SamplingParams(), 0, 1, tenant=tenant, cache_salt=salt, pooling="last"
            )
            await dialect.embedding(server, request, "m")
    salts = [body.get("cache_salt") for body in bodies]
    assert salts == ["a:", "b:s", None, None, ":s", None]


async def test_a_pooling_that_only_the_server_knows_is_the_default(
    redis_url: str,
    queue: AsyncRequestQueue,
    model: Path,
    engine: str,
    stand_in: StandIn,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    async with running_worker(redis_url, await served(engine, stand_in.url, folder)):
        assert_vector(await embedded(queue, **raw(engine)), engine)
        error = (await embedded(queue, pooling="last"))["error"]
        assert error["message"].startswith("embed: this worker's engine pools as its model does")
