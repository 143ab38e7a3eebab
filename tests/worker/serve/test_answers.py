"""A worker's answers: tokens, logprobs, stop strings, and errors of one request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.api.messages import SequenceOutput, StepOutput
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from tests.support.model_free import (
    BY_ITSELF,
    ModelFreeRunner,
    ModelFreeStep,
    finished,
    running_worker,
    served_model_free,
    text_of,
)
from tests.support.requests import async_log_of, async_put


async def test_streams_the_expected_tokens_and_finishes(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, **BY_ITSELF) as worker:
        requests = [await async_put(queue, seed=n, max_tokens=n + 1) for n in range(40)]
        results = [await finished(queue, request_id) for request_id in requests]
        for n, (request_id, result) in enumerate(zip(requests, results, strict=True)):
            assert result["text"] == text_of(n, n + 1)
            assert result["finish_reason"] == "length"
            assert result["usage"]["completion_tokens"] == n + 1
            assert result["usage"]["prompt_tokens"] == len("Once upon a time")
            events = await async_log_of(queue, request_id)
            assert [event["index"] for event in events] == list(range(n + 1))
            assert [bool(event["finish_reason"]) for event in events] == [False] * n + [True]
        assert worker.engine.stats.recomputed_tokens == 0


async def test_stop_strings_and_stop_tokens_end_a_request(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 200)
    stop = whole[20:23]
    cut = whole.index(stop)
    token = ord("q")
    async with running_worker(redis_url):
        by_string = await async_put(queue, seed=7, max_tokens=200, stop=["never there", stop])
        by_token = await async_put(queue, seed=7, max_tokens=200, stop_token_ids=[token])
        result = await finished(queue, by_string)
        assert (result["text"], result["finish_reason"]) == (whole[:cut], "stop")
        assert len(result["token_ids"]) == cut + 3
        result = await finished(queue, by_token)
        assert (result["text"], result["finish_reason"]) == (whole[: whole.index("q")], "stop")
        assert result["token_ids"][-1] == token


async def test_logprobs_come_with_each_token(redis_url: str, queue: AsyncRequestQueue) -> None:
    async with running_worker(redis_url):
        request_id = await async_put(queue, max_tokens=4, logprobs=2)
        result = await finished(queue, request_id)
        assert [item["token_id"] for item in result["logprobs"]] == result["token_ids"]


BAD_PAYLOADS = [
    ("not json", "payload: "),
    ("[1]", "payload: "),
    ('{"prompt": "a", "colour": 1}', "colour: "),
    ('{"prompt": "a", "temperature": 7}', "temperature: "),
    ('{"prompt": ""}', "prompt: "),
    ('{"prompt": []}', "prompt: "),
    ('{"max_tokens": 3}', "prompt: "),
    ('{"prompt": [1, 99999]}', "prompt: "),
    ('{"prompt": "a", "stop_token_ids": [99999]}', "stop_token_ids: "),
    ('{"prompt": "a", "logit_bias": {"99999": 1}}', "logit_bias: "),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: "),
    ('{"prompt": "a", "model": "another"}', "model: "),
    ('{"prompt": "a", "response_format": {"type": "json_object"}}', "response_format: "),
    ('{"prompt": "' + "long " * 3000 + '"}', "prompt: "),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens: "),
    ('{"prompt": "a", "min_tokens": 5, "max_tokens": 2}', "min_tokens: "),
    ('{"prompt": "\\ud800"}', "payload: "),
    ('{"messages": []}', "messages: "),
    (b'{"prompt": "\xff"}', "payload: "),
]


async def test_bad_input_gets_an_error_that_names_the_field_and_the_worker_goes_on(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url):
        for n, (payload, _) in enumerate(BAD_PAYLOADS):
            async with queue.redis.pipeline() as pipe:
                pipe.hset(queue.keys.request(f"bad-{n}"), "payload", payload)
                pipe.zadd(queue.keys.pending, {f"bad-{n}": n})
                pipe.publish(queue.keys.control, "pending")
                await pipe.execute()
        for n, (payload, begins) in enumerate(BAD_PAYLOADS):
            result = await finished(queue, f"bad-{n}")
            assert result["finish_reason"] == "error", payload
            assert result["error"]["message"].startswith(begins), (payload, result["error"])
            events = await async_log_of(queue, f"bad-{n}")
            assert len(events) == 1
            assert events[0]["error"]["type"] in ("invalid_request", "unsupported")
        good = await async_put(queue, seed=1, max_tokens=3)
        assert (await finished(queue, good))["text"] == text_of(1, 3)


async def test_what_is_no_event_in_a_log_ends_that_request_alone(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    spoilt = await async_put(queue, max_tokens=5)
    await queue.redis.xadd(queue.keys.tokens(spoilt), {"event": "junk"}, id="1-0")
    async with running_worker(redis_url):
        good = await async_put(queue, seed=1, max_tokens=3)
        assert (await finished(queue, good))["text"] == text_of(1, 3)
        error = (await finished(queue, spoilt))["error"]
        assert (error["type"], error["message"][:8]) == ("invalid_request", "tokens: ")
    assert "crashes" not in await queue.run(lookups.record(queue.keys, spoilt))


class SpoilingRunner(ModelFreeRunner):
    """Cannot sample for a sequence that holds the token `?`, but for all others."""

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        return [
            [replace(token, error="no finite logits") for token in tokens]
            if ord("?") in share.sequence.token_ids
            else tokens
            for share, tokens in zip(
                launched.batch.sampling, super().collect(launched), strict=True
            )
        ]


async def test_what_the_engine_cannot_do_for_one_request_fails_that_one_alone(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    engine = LLMEngine(SpoilingRunner(), max_num_seqs=4, max_num_batched_tokens=64)
    async with running_worker(redis_url, replace(served_model_free(), engine=engine)):
        good, bad = (
            await async_put(queue, seed=6, max_tokens=50),
            await async_put(queue, prompt="why?"),
        )
        result = await finished(queue, bad)
        assert result["finish_reason"] == "error"
        assert result["error"] == {"type": "internal_error", "message": "no finite logits"}
        assert (await finished(queue, good))["text"] == text_of(6, 50)


class BundlingEngine:
    """An engine that returns the outputs of three steps at once, as if it drafted tokens."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> StepOutput:
        merged: dict[int, SequenceOutput] = {}
        for _ in range(3):
            for output in self._engine.step().outputs:
                if output.sequence_id not in merged:
                    merged[output.sequence_id] = output
                    continue
                bundle = merged[output.sequence_id]
                bundle.token_ids += output.token_ids
                bundle.logprobs = (bundle.logprobs or []) + (output.logprobs or [])
                bundle.finish_reason, bundle.timing = output.finish_reason, output.timing
        return StepOutput(list(merged.values()), self._engine.stats)


async def test_several_tokens_of_a_step_are_cut_at_a_stop_string_with_their_logprobs(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 40)
    served = served_model_free()
    served = replace(served, engine=BundlingEngine(served.engine))
    async with running_worker(redis_url, served):
        for at in range(20, 24):
            stop = whole[at : at + 2]
            cut = whole.index(stop)
            request_id = await async_put(queue, seed=7, max_tokens=40, stop=stop, logprobs=1)
            result = await finished(queue, request_id)
            assert (result["text"], result["finish_reason"]) == (whole[:cut], "stop")
            assert len(result["token_ids"]) == cut + 2
            assert [item["token_id"] for item in result["logprobs"]] == result["token_ids"]
