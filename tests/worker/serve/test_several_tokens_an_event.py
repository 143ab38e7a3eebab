"""Tokens that share an event: they wait for each other, and none is held back for good."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.metrics import BETWEEN_TOKENS
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.leases import coalescer
from promptq.worker.serve.build import Served
from promptq.worker.serve.worker import Worker
from tests.support.model_free import (
    BY_ITSELF,
    ModelFreeRunner,
    ModelFreeStep,
    finished,
    running_worker,
    served_model_free,
    text_of,
)
from tests.support.requests import async_log_of, async_num_tokens, async_put, until_tokens
from tests.support.roles import as_role


def indices(events: list[dict[str, Any]]) -> list[int]:
    return [event["index"] for event in events]


def ends(events: list[dict[str, Any]]) -> list[int]:
    return [event["index"] + len(event["token_ids"]) for event in events]


@pytest.mark.usefixtures("guessed_lookups")
async def test_drafted_tokens_come_in_one_event_and_change_none(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 60)
    served = served_model_free(speculative_tokens=7)
    async with running_worker(redis_url, served, **BY_ITSELF) as worker:
        fields = {"prompt": f"0{whole}1", "seed": 7, "max_tokens": 60, "logprobs": 1}
        drafted, plain = (
            await async_put(queue, **fields),
            await async_put(queue, **fields, speculative_tokens=0),
        )
        stop = whole[31:34]
        stopped = await async_put(queue, **fields, stop=stop)
        results = [await finished(queue, request_id) for request_id in (drafted, plain, stopped)]
        assert [each["text"] for each in results] == [whole, whole, whole[: whole.index(stop)]]
        assert results[0]["token_ids"] == results[1]["token_ids"]
        for result in results:
            assert [item["token_id"] for item in result["logprobs"]] == result["token_ids"]
        events = {each: await async_log_of(queue, each) for each in (drafted, plain)}
        assert len(events[plain]) == 60
        assert len(events[drafted]) < 40
        for log in events.values():
            assert indices(log) == [0, *ends(log)[:-1]]
        stats = worker.heartbeat.stats()
        assert stats.drafted_tokens >= stats.accepted_tokens > 20


async def test_many_streams_get_some_tokens_an_event_but_the_first_at_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(step_seconds=0.002)
    async with running_worker(redis_url, served, max_events_per_second=200) as worker:
        fields = {"max_tokens": 60, "logprobs": 0}
        requests = [await async_put(queue, seed=n, **fields) for n in range(20)]
        stop = text_of(7, 60)[40:43]
        stopping = await async_put(queue, seed=7, **fields, stop=stop)
        counts = []
        for n, request_id in enumerate(requests):
            result = await finished(queue, request_id)
            assert result["text"] == text_of(n, 60)
            assert [each["token_id"] for each in result["logprobs"]] == result["token_ids"]
            events = await async_log_of(queue, request_id)
            assert indices(events) == [0, *ends(events)[:-1]]
            assert len(events[0]["token_ids"]) == 1
            counts.append(len(events))
        assert max(counts) < 30
        result = await finished(queue, stopping)
        assert result["text"] == text_of(7, 60).split(stop)[0]
        events = await async_log_of(queue, stopping)
        assert len(events) > max(counts)  # each token is looked at as it comes
        buckets, _ = worker.meter.histograms[BETWEEN_TOKENS].exposed()
        assert buckets[-1][1] >= 20 * 59, "what the engine needs for a token is measured by step"


async def test_tokens_that_wait_for_others_are_sent_though_no_step_follows(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """No step follows if a request is preempted, or a step takes long."""
    runner = PausingRunner()
    async with running_worker(redis_url, served_by(runner), max_events_per_second=1) as worker:
        request_id = await async_put(queue, seed=3, max_tokens=40)
        try:
            await until_tokens(queue, request_id, 11)
            assert await async_num_tokens(queue, request_id) == 11
        finally:
            runner.may_go_on.set()
        assert (await finished(queue, request_id))["text"] == text_of(3, 40)
        assert worker.engine.stats.recomputed_tokens == 0


class PausingRunner(ModelFreeRunner):
    """Waits in the step after the 11th until it may go on, then fails if it is to."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(step_seconds=0.005)
        self.may_go_on = threading.Event()
        self.has_paused = threading.Event()
        self._error = error
        self._num_steps = 0

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        self._num_steps += 1
        if self._num_steps > 11:
            self.has_paused.set()
            self.may_go_on.wait()
            if self._error is not None:
                raise self._error
        return super().collect(launched)


def served_by(runner: ModelFreeRunner) -> Served:
    return replace(
        served_model_free(), engine=LLMEngine(runner, max_num_seqs=8, max_num_batched_tokens=64)
    )


@pytest.fixture
def never_due(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Settings with which nothing that waits for more of its stream comes to be due."""
    monkeypatch.setattr(coalescer, "LONGEST_SECONDS", 3600.0)
    return {"max_events_per_second": 1e-3}


async def test_tokens_that_wait_for_others_are_sent_before_a_request_goes_back(
    redis_url: str, queue: AsyncRequestQueue, never_due: dict[str, float]
) -> None:
    runner = PausingRunner()
    async with running_worker(redis_url, served_by(runner), drain_seconds=0, **never_due):
        request_id = await async_put(queue, seed=3, max_tokens=40)
        await asyncio.to_thread(runner.has_paused.wait)
        assert await async_num_tokens(queue, request_id) < 11
        asyncio.get_running_loop().call_later(0.2, runner.may_go_on.set)
    assert await queue.state(request_id) is RequestState.WAITING
    assert await async_num_tokens(queue, request_id) >= 11


@pytest.mark.parametrize("error", [RuntimeError("broken"), TimeoutError("broken")])
async def test_tokens_that_wait_for_others_are_sent_before_a_failure_ends_the_worker(
    redis_url: str, queue: AsyncRequestQueue, never_due: dict[str, float], error: Exception
) -> None:
    """Whatever the engine fails with, even what a timer would say."""
    runner = PausingRunner(error)
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        worker = Worker(WorkerSettings(**never_due), served_by(runner), client)
        await worker.start()
        request_id = await async_put(queue, seed=3, max_tokens=40)
        await asyncio.to_thread(runner.has_paused.wait)
        runner.may_go_on.set()
        with pytest.raises(type(error), match="broken"):
            await worker.serve(asyncio.Event())
        assert await async_num_tokens(queue, request_id) == 11
        await worker.stop()


async def test_tokens_behind_a_stop_string_are_not_measured(
    redis_url: str, queue: AsyncRequestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps come at once where the server is slow, and all but the first are for nothing."""
    publish = AsyncRequestQueue.publish

    async def slow_publish(self: AsyncRequestQueue, *args: Any) -> Any:
        await asyncio.sleep(0.05)
        return await publish(self, *args)

    monkeypatch.setattr(AsyncRequestQueue, "publish", slow_publish)
    stop = text_of(7, 200)[100:104]
    async with running_worker(redis_url, served_model_free(step_seconds=0.002)) as worker:
        request_id = await async_put(queue, seed=7, max_tokens=200, stop=stop)
        result = await finished(queue, request_id)
        counts, _ = worker.meter.histograms[BETWEEN_TOKENS].exposed()
        assert counts[-1][1] == len(result["token_ids"]) - 1


async def test_a_stop_string_that_never_comes_holds_nothing_back_in_the_end(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 30)
    async with running_worker(redis_url):
        request_id = await async_put(queue, seed=7, max_tokens=30, stop=whole[-3:] + "never")
        assert (await finished(queue, request_id))["text"] == whole
