"""A worker serves the scores of documents, which an inference server for pooling computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptq import AsyncClient
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.programs.stand_in_server.starting import StandIn, stand_in_server
from tests.programs.stand_in_server.vllm import score_of
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put
from tests.support.waiting import async_until
from tests.worker.upstream.test_watched_streams import served

QUERY, DOCUMENTS = "old fox", ["a fox", "an old baker", "the snow"]
WANTED = [pytest.approx(score_of(QUERY, document), rel=1e-6) for document in DOCUMENTS]


@pytest.fixture(params=["vllm", "llama.cpp", "openai"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def stand_in(engine: str) -> Iterator[StandIn]:
    with stand_in_server("vllm" if engine == "openai" else engine, "--scores") as server:
        yield server


async def scored(queue: AsyncRequestQueue) -> Any:
    return await finished(
        queue, await async_put(queue, prompt=DOCUMENTS[0], embed={"query": QUERY})
    )


async def test_scores_come_through_the_queue_and_nothing_else_does(
    redis_url: str, queue: AsyncRequestQueue, model: Path, engine: str, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served(engine, stand_in.url, model)):
        async with AsyncClient(redis_url, queue=queue.keys.queue) as client:
            assert await client.rerank(QUERY, DOCUMENTS) == WANTED
        usage = (await scored(queue))["usage"]
        assert usage["prompt_tokens"] == len(QUERY) + len(DOCUMENTS[0]) + 3  # as the server counts
        for fields in ({"embed": {}}, {"max_tokens": 3}):
            error = (await finished(queue, await async_put(queue, prompt="a", **fields)))["error"]
            assert error["type"] == "unsupported"
            assert error["message"].startswith("embed: ")


async def test_a_server_that_fails_gets_the_request_again(
    redis_url: str, queue: AsyncRequestQueue, model: Path, engine: str, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served(engine, stand_in.url, model)) as worker:
        stand_in.fail("break")
        request_id = await async_put(queue, prompt=DOCUMENTS[0], embed={"query": QUERY})
        await async_until(lambda: not worker.engine.is_accepting)
        stand_in.fail("")
        assert (await finished(queue, request_id))["finish_reason"] == "stop"
        for fault, why in (
            ("spoil", "no vector of 1 finite numbers"),
            ("too_long", "prompt: the input is too long"),
        ):
            stand_in.fail(fault)
            assert why in (await scored(queue))["error"]["message"]
        stand_in.fail("")
        assert (await scored(queue))["finish_reason"] == "stop"


async def test_a_server_for_vectors_refuses_scores_by_name(
    redis_url: str, queue: AsyncRequestQueue, model: Path
) -> None:
    with stand_in_server("vllm", "--pooling") as stand_in:
        async with running_worker(redis_url, await served("vllm", stand_in.url, model)):
            error = (await scored(queue))["error"]
            message = "embed: no live worker's engine serves scores"
            assert (error["type"], error["message"]) == ("unsupported", message)
