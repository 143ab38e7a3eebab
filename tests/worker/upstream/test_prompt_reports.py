"""Log-probabilities of a prompt from an inference server, which come with the first token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.programs.stand_in_server.starting import StandIn, stand_in_server
from tests.support.model_free import finished, running_worker
from tests.support.requests import async_put
from tests.worker.text.grammars.structured import closed, json_schema
from tests.worker.upstream.test_watched_streams import served

PROMPT = "a fox"
FORM = json_schema(closed(fox={"type": "boolean"}))


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with stand_in_server("vllm", "--token-seconds", "0.001") as server:
        yield server


async def report(queue: AsyncRequestQueue, num_top: int, **fields: Any) -> Any:
    greedy = {"temperature": 0.0, "max_tokens": 60}
    request = {"prompt": PROMPT, "prompt_logprobs": num_top, **greedy, **fields}
    return await finished(queue, await async_put(queue, **request))


@pytest.mark.parametrize("fields", [{}, {"response_format": FORM}, {"max_tokens": 1}])
async def test_the_report_is_the_servers_whatever_bounds_the_output(
    redis_url: str,
    queue: AsyncRequestQueue,
    model: Path,
    stand_in: StandIn,
    fields: dict[str, Any],
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, model)):
        plain = await report(queue, 0, **fields)
        whole = await report(queue, 3, **fields)
    assert whole["text"] == plain["text"] != ""
    first, *others = whole["prompt_logprobs"]
    assert first is None
    for entry, bare, token_id in zip(
        others, plain["prompt_logprobs"][1:], PROMPT.encode()[1:], strict=True
    ):
        own = (entry["token_id"], entry["logprob"], entry["rank"])
        assert own == (token_id, -1.0 - token_id, token_id + 1)
        assert own == (bare["token_id"], bare["logprob"], bare["rank"])
        assert [(it["token_id"], it["logprob"]) for it in entry["top"]] == [
            (0, -1.0),
            (1, -2.0),
            (2, -3.0),
        ]
        assert not bare.get("top")


async def test_a_server_that_reports_none_is_found_out_at_the_start(
    redis_url: str, queue: AsyncRequestQueue, model: Path, stand_in: StandIn
) -> None:
    stand_in.fail("unreport")
    here = await served("vllm", stand_in.url, model)
    assert "prompt_logprobs" in here.engine.abilities.refused
    async with running_worker(redis_url, here):
        result = await report(queue, 0)
    assert result["error"]["type"] == "unsupported"
    assert result["error"]["message"].startswith("prompt_logprobs: ")


async def test_a_server_that_fails_to_report_can_be_used_for_the_rest(
    model: Path, stand_in: StandIn
) -> None:
    stand_in.fail("break_reports")
    here = await served("vllm", stand_in.url, model)
    assert "prompt_logprobs" in here.engine.abilities.refused
    assert "response_format" not in here.engine.abilities.refused


async def test_a_report_that_is_no_number_ends_its_request_alone(
    redis_url: str, queue: AsyncRequestQueue, model: Path, stand_in: StandIn
) -> None:
    async with running_worker(redis_url, await served("vllm", stand_in.url, model)) as worker:
        stand_in.fail("spoil")
        spoilt = await report(queue, 0)
        assert spoilt["finish_reason"] == "error"
        assert "a log-probability of the prompt is not finite" in spoilt["error"]["message"]
        assert worker.engine.is_accepting
        plain = await finished(queue, await async_put(queue, prompt=PROMPT, max_tokens=3))
        assert plain["finish_reason"] == "length"
        stand_in.fail("")
        again = await report(queue, 0)
        assert all(math.isfinite(it["logprob"]) for it in again["prompt_logprobs"][1:])
