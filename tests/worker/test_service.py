"""A worker serves a queue: in this event loop, on a real server, with the model-free engine."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from promptq.shared.errors import ModelMismatchError
from promptq.shared.protocol.claims import Held, ModelIdentity, Room
from promptq.shared.protocol.request import NewRequest, Request, RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.shared.runtime.metrics import BETWEEN_TOKENS
from promptq.shared.runtime.settings import Settings
from promptq.worker.engine.api.messages import SequenceOutput, StepOutput
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.leases.lease import LeaseState
from promptq.worker.publishing import coalescer
from promptq.worker.served_model import Served
from promptq.worker.service import Worker
from tests.helpers import finished, running_worker, served_model_free, text_of
from tests.integration.faults import OwnServer
from tests.model_free import ModelFreeRunner, ModelFreeStep
from tests.roles import AsyncQueueClient, as_role

BY_ITSELF = {"max_events_per_second": math.inf}
"""Settings of a worker that sends each token by itself."""


async def put(queue: AsyncRequestQueue, **fields: Any) -> str:
    fields.setdefault("prompt", "Once upon a time")
    return (await queue.enqueue([NewRequest(new_request_id(), Request.build(fields))]))[0]


async def log_of(queue: AsyncRequestQueue, request_id: str) -> list[dict[str, Any]]:
    events = await queue.run(lookups.log_after(queue.keys, request_id, 0))
    return [json.loads(event) for event in events]


def indices(events: list[dict[str, Any]]) -> list[int]:
    return [event["index"] for event in events]


def ends(events: list[dict[str, Any]]) -> list[int]:
    return [event["index"] + len(event["token_ids"]) for event in events]


async def num_tokens(queue: AsyncRequestQueue, request_id: str) -> int:
    return sum(len(event["token_ids"]) for event in await log_of(queue, request_id))


def is_prepared(worker: Worker, request_id: str) -> bool:
    lease = worker.leases.by_request(request_id)
    return lease is not None and lease.state is not LeaseState.PREPARING


async def until_tokens(queue: AsyncRequestQueue, request_id: str, count: int) -> None:
    while await num_tokens(queue, request_id) < count:
        await asyncio.sleep(0.002)


@pytest.fixture
async def queue(redis_url: str) -> Any:
    client = AsyncQueueClient.from_url(as_role("", redis_url))
    yield AsyncRequestQueue(client)
    await client.aclose()


async def test_streams_the_expected_tokens_and_finishes(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, **BY_ITSELF) as worker:
        requests = [await put(queue, seed=n, max_tokens=n + 1) for n in range(40)]
        results = [await finished(queue, request_id) for request_id in requests]
        for n, (request_id, result) in enumerate(zip(requests, results, strict=True)):
            assert result["text"] == text_of(n, n + 1)
            assert result["finish_reason"] == "length"
            assert result["usage"]["completion_tokens"] == n + 1
            assert result["usage"]["prompt_tokens"] == len("Once upon a time")
            events = await log_of(queue, request_id)
            assert [event["index"] for event in events] == list(range(n + 1))
            assert [bool(event["finish_reason"]) for event in events] == [False] * n + [True]
        assert worker.engine.stats.recomputed_tokens == 0


async def test_more_urgent_requests_run_first(redis_url: str, queue: AsyncRequestQueue) -> None:
    order: list[str] = []
    ids = {}
    for name, priority in [("late", 5), ("middle", 0), ("soon", -5)]:
        ids[name] = await put(queue, priority=priority, max_tokens=5)
    async with running_worker(redis_url, served_model_free(max_num_seqs=1, step_seconds=0.005)):
        pending = dict(ids)
        while pending:
            for name, request_id in list(pending.items()):
                state = await queue.state(request_id)
                if state is RequestState.COMPLETED:
                    order.append(name)
                    del pending[name]
            await asyncio.sleep(0.002)
    assert order == ["soon", "middle", "late"]


async def test_what_is_prefetched_goes_out_by_priority_even_if_it_came_later(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.01)
    async with running_worker(redis_url, served, prefetch_depth=8) as worker:
        first = await put(queue, max_tokens=2000)
        await until_tokens(queue, first, 1)
        others = [await put(queue, priority=1, max_tokens=2) for _ in range(5)]
        while len(worker.leases.ready) < 3:
            await asyncio.sleep(0.002)
        urgent = await put(queue, priority=0, max_tokens=2)
        while not is_prepared(worker, urgent):
            await asyncio.sleep(0.002)
        await queue.cancel(first)
        result = await finished(queue, urgent)
        # One of the others may already lie in the engine, behind the slot; no more than that.
        states = [await queue.state(request_id) for request_id in others]
        assert states.count(RequestState.COMPLETED) <= 1
        assert result["finish_reason"] == "length"
        for request_id in others:
            await finished(queue, request_id)


async def test_an_urgent_request_preempts_and_both_end_right(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.005)
    async with running_worker(redis_url, served) as worker:
        lazy = await put(queue, seed=1, priority=5, max_tokens=60)
        await until_tokens(queue, lazy, 5)
        urgent = await put(queue, seed=2, priority=-5, max_tokens=5)
        assert (await finished(queue, urgent))["text"] == text_of(2, 5)
        assert await queue.state(lazy) is RequestState.ACTIVE
        result = await finished(queue, lazy)
        assert result["text"] == text_of(1, 60)
        assert result["stats"]["preemptions"] == 1
        assert worker.engine.stats.num_preemptions == 1


async def test_a_cancel_stops_the_stream_and_frees_the_blocks(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)) as worker:
        request_id = await put(queue, max_tokens=1000)
        await until_tokens(queue, request_id, 5)
        await queue.cancel(request_id)
        result = await finished(queue, request_id)
        assert result["finish_reason"] == "cancelled"
        count = result["usage"]["completion_tokens"]
        assert 5 <= count < 1000
        assert result["usage"]["prompt_tokens"] == len("Once upon a time")
        while worker.served.engine.stats.num_used_blocks:
            await asyncio.sleep(0.002)
        events = await log_of(queue, request_id)
        assert sum(len(event["token_ids"]) for event in events) == count
        assert [event["finish_reason"] for event in events[-2:]] == [None, "cancelled"]


async def test_the_flag_and_a_message_of_a_plain_client_cancel(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    served = served_model_free(max_num_seqs=1, step_seconds=0.01)
    async with running_worker(redis_url, served, prefetch_depth=0):
        running = await put(queue, max_tokens=1000)
        await until_tokens(queue, running, 3)
        waiting = [await put(queue, priority=9) for _ in range(5)]
        for request_id in [running, *waiting]:
            await client.hset(queue.keys.request(request_id), "cancelled", "1")
            await client.publish(queue.keys.control, f"cancel:{request_id}")
        for request_id in [running, *waiting]:
            assert (await finished(queue, request_id))["finish_reason"] == "cancelled"
    await client.aclose()


async def test_a_message_without_the_flag_cancels_nothing(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    async with running_worker(redis_url, served_model_free(step_seconds=0.005)):
        request_id = await put(queue, max_tokens=20)
        await until_tokens(queue, request_id, 3)
        await client.publish(queue.keys.control, f"cancel:{request_id}")
        await client.publish(queue.keys.control, b"\xff\xfe:\x00")
        assert (await finished(queue, request_id))["finish_reason"] == "length"
    await client.aclose()


async def test_a_deadline_ends_a_running_request(redis_url: str, queue: AsyncRequestQueue) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)):
        request_id = await put(queue, max_tokens=2000, deadline_ms=1000)
        result = await finished(queue, request_id)
        assert result["finish_reason"] == "expired"
        assert 0 < len(result["token_ids"]) < 2000


async def test_stop_strings_and_stop_tokens_end_a_request(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 200)
    stop = whole[20:23]
    cut = whole.index(stop)
    token = ord("q")
    async with running_worker(redis_url):
        by_string = await put(queue, seed=7, max_tokens=200, stop=["never there", stop])
        by_token = await put(queue, seed=7, max_tokens=200, stop_token_ids=[token])
        result = await finished(queue, by_string)
        assert (result["text"], result["finish_reason"]) == (whole[:cut], "stop")
        assert len(result["token_ids"]) == cut + 3
        result = await finished(queue, by_token)
        assert (result["text"], result["finish_reason"]) == (whole[: whole.index("q")], "stop")
        assert result["token_ids"][-1] == token


async def test_logprobs_come_with_each_token(redis_url: str, queue: AsyncRequestQueue) -> None:
    async with running_worker(redis_url):
        request_id = await put(queue, max_tokens=4, logprobs=2)
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
    client = redis.asyncio.Redis.from_url(redis_url)
    async with running_worker(redis_url):
        for n, (payload, _) in enumerate(BAD_PAYLOADS):
            async with client.pipeline() as pipe:
                pipe.hset(queue.keys.request(f"bad-{n}"), "payload", payload)
                pipe.zadd(queue.keys.pending, {f"bad-{n}": n})
                pipe.publish(queue.keys.control, "pending")
                await pipe.execute()
        for n, (payload, begins) in enumerate(BAD_PAYLOADS):
            result = await finished(queue, f"bad-{n}")
            assert result["finish_reason"] == "error", payload
            assert result["error"]["message"].startswith(begins), (payload, result["error"])
            events = await log_of(queue, f"bad-{n}")
            assert len(events) == 1
            assert events[0]["error"]["type"] in ("invalid_request", "unsupported")
        good = await put(queue, seed=1, max_tokens=3)
        assert (await finished(queue, good))["text"] == text_of(1, 3)
    await client.aclose()


async def test_a_drained_worker_gives_back_with_progress_and_another_goes_on(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=2, step_seconds=0.005)
    async with running_worker(redis_url, served, drain_seconds=0.0, **BY_ITSELF):
        requests = [await put(queue, seed=n, max_tokens=1000) for n in range(6)]
        await until_tokens(queue, requests[0], 10)
    assert await queue.count() == 6
    async with running_worker(redis_url, **BY_ITSELF):
        for n, request_id in enumerate(requests):
            result = await finished(queue, request_id)
            assert result["text"] == text_of(n, 1000)
        events = await log_of(queue, requests[0])
        assert [event["index"] for event in events] == list(range(1000))
        assert {event["attempt"] for event in events} == {1, 2}


async def test_draining_finishes_what_runs(redis_url: str, queue: AsyncRequestQueue) -> None:
    served = served_model_free(max_num_seqs=2, step_seconds=0.002)
    async with running_worker(redis_url, served, drain_seconds=60):
        running = await put(queue, seed=3, max_tokens=100)
        await until_tokens(queue, running, 2)
    assert (await finished(queue, running))["text"] == text_of(3, 100)


async def test_a_request_whose_progress_is_complete_only_gets_its_last_event(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """A worker with a longer model left it one token from the length that this one can hold."""
    request_id = await put(queue, seed=1, prompt="ab", max_tokens=1000)
    async with running_worker(redis_url, served_model_free(step_seconds=0.005), drain_seconds=0):
        await until_tokens(queue, request_id, 30)
    so_far = await num_tokens(queue, request_id)
    served = served_model_free(max_model_len=20)
    async with running_worker(redis_url, served):
        result = await finished(queue, request_id)
    assert result["finish_reason"] == "length"
    assert result["text"] == text_of(1, so_far)


async def test_two_workers_share_a_queue(redis_url: str, queue: AsyncRequestQueue) -> None:
    slow = {"max_num_seqs": 2, "step_seconds": 0.002}
    async with (
        running_worker(redis_url, served_model_free(**slow)) as one,
        running_worker(redis_url, served_model_free(**slow)) as two,
    ):
        requests = [await put(queue, seed=n, max_tokens=20) for n in range(30)]
        for n, request_id in enumerate(requests):
            assert (await finished(queue, request_id))["text"] == text_of(n, 20)
        assert one.engine.stats.num_processed + two.engine.stats.num_processed == 30
        assert min(one.engine.stats.num_processed, two.engine.stats.num_processed) > 0


async def test_a_worker_whose_lease_was_taken_lets_go(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)) as worker:
        request_id = await put(queue, seed=5, max_tokens=100)
        await until_tokens(queue, request_id, 3)
        # Another attempt took it over: the fence is not this worker's any more.
        await client.hset(queue.keys.request(request_id), "fence", "2-other")
        while worker.served.engine.stats.num_used_blocks or len(worker.leases):
            await asyncio.sleep(0.002)
        written = len(await log_of(queue, request_id))
        await asyncio.sleep(0.05)
        assert len(await log_of(queue, request_id)) == written
    await client.aclose()


async def test_a_worker_finds_work_whose_wake_up_it_missed(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    async with running_worker(redis_url):
        await asyncio.sleep(0.1)
        await client.hset(queue.keys.request("silent"), "payload", '{"prompt":"a","max_tokens":2}')
        await client.zadd(queue.keys.pending, {"silent": 1})
        assert (await finished(queue, "silent"))["finish_reason"] == "length"
    await client.aclose()


async def test_what_is_no_event_in_a_log_ends_that_request_alone(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    spoilt = await put(queue, max_tokens=5)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.xadd(queue.keys.tokens(spoilt), {"event": "junk"}, id="1-0")
    async with running_worker(redis_url):
        good = await put(queue, seed=1, max_tokens=3)
        assert (await finished(queue, good))["text"] == text_of(1, 3)
        error = (await finished(queue, spoilt))["error"]
        assert (error["type"], error["message"][:8]) == ("invalid_request", "tokens: ")
    assert "crashes" not in await queue.run(lookups.record(queue.keys, spoilt))


async def test_a_worker_tells_how_it_fares(redis_url: str, queue: AsyncRequestQueue) -> None:
    async with running_worker(redis_url) as worker:
        await finished(queue, await put(queue, max_tokens=5))
        while True:
            told = await queue.run(lookups.worker_stats(queue.keys, worker.worker_id))
            if told is not None and told.mean_generation_ms:
                break
            await asyncio.sleep(0.05)
        assert (told.generation_tokens, told.num_processed, told.model) == (5, 1, "model-free")
        assert told.prompt_tokens == len("Once upon a time")
        assert told.heartbeat_at > 0
    assert await queue.run(lookups.live_worker_ids(queue.keys, 0)) == []


@pytest.mark.parametrize("worker_id", ["stranger", b"\xff"])
async def test_a_worker_starts_whatever_a_stranger_wrote_about_others(
    redis_url: str, queue: AsyncRequestQueue, worker_id: str | bytes
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as client:
        await client.zadd(queue.keys.workers, {worker_id: 2**52})
        await client.hset(queue.keys.worker("stranger"), "max_model_len", "nonsense")
    async with running_worker(redis_url):
        assert (await finished(queue, await put(queue, seed=1, max_tokens=5)))["text"] == text_of(
            1, 5
        )


async def test_a_worker_of_another_model_refuses_to_start(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    other_model = ModelIdentity("llama", "123")
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as client:
        other = AsyncRequestQueue(client, model=other_model)
        await other.take_batch(Room(max_count=0, token_budget=0))
    with pytest.raises(ModelMismatchError, match="llama"):
        async with running_worker(redis_url):
            pass


async def test_a_request_released_by_hand_is_claimed_again(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    request_id = await put(queue, seed=9, max_tokens=5)
    claim = await queue.take(timeout=5)
    assert claim is not None
    async with running_worker(redis_url):
        await queue.release([Held(request_id, claim.fence)])
        assert (await finished(queue, request_id))["text"] == text_of(9, 5)


# --- what may go wrong


async def test_draining_ends_whenever_it_comes_and_with_every_last_event(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Also when the last token is just on its way, which no cancellation may cut off."""
    served = {"max_num_seqs": 2, "step_seconds": 0.002}
    for n in range(12):
        async with running_worker(redis_url, served_model_free(**served), drain_seconds=60):
            request_id = await put(queue, seed=n, max_tokens=8 + n)
            await until_tokens(queue, request_id, 2)
        assert await queue.state(request_id) is RequestState.COMPLETED


async def test_urgent_requests_are_claimed_no_further_than_they_can_preempt(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """The backlog stays in the queue, where other workers find it."""
    served = served_model_free(max_num_seqs=4, step_seconds=0.02, num_blocks=512)
    async with running_worker(redis_url, served, drain_seconds=0, prefetch_depth=1) as worker:
        for request_id in [await put(queue, priority=9, max_tokens=2000) for _ in range(4)]:
            await until_tokens(queue, request_id, 1)
        most = 0
        for _ in range(100):
            await put(queue, priority=0, max_tokens=500)
            most = max(most, len(worker.leases))
        assert 4 < most <= 4 + 1 + 1 + 4, "slots, one ahead in the engine, prefetched, preempting"
        assert await queue.count() > 80


async def test_a_worker_that_claims_its_own_lost_request_runs_it_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    served = served_model_free(step_seconds=0.03)
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        request_id = await put(queue, seed=2, max_tokens=30)
        await until_tokens(queue, request_id, 2)
        await client.zadd(queue.keys.leases, {request_id: 1})
        assert (await queue.reap()).returned == 1
        result = await finished(queue, request_id)
        assert result["text"] == text_of(2, 30)
        assert result["stats"]["attempts"] == 2
        assert worker.meter.num_fences_lost == 1
        while worker.leases.num_running or worker.served.engine.has_work:
            await asyncio.sleep(0.002)
    await client.aclose()


async def test_leases_are_kept_for_as_long_as_it_takes(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Of what runs, what waits inside the engine and what lies ready."""
    served = served_model_free(max_num_seqs=1, step_seconds=0.02)
    async with running_worker(redis_url, served, lease_ms=600, prefetch_depth=2):
        requests = [await put(queue, seed=n, max_tokens=60) for n in range(4)]
        for n, request_id in enumerate(requests):
            result = await finished(queue, request_id)
            assert result["text"] == text_of(n, 60)
            assert result["stats"]["attempts"] == 1


async def test_an_urgent_request_gets_into_a_full_engine(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.005)
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        lazy = [await put(queue, priority=5, max_tokens=2000) for _ in range(3)]
        while worker.leases.num_running < 2:
            await asyncio.sleep(0.002)
        urgent = await put(queue, priority=-5, seed=3, max_tokens=5)
        assert (await finished(queue, urgent))["text"] == text_of(3, 5)
        assert [await queue.state(it) for it in lazy[:2]] == [RequestState.ACTIVE] * 2


async def test_claims_no_more_than_its_kv_memory_is_expected_to_hold(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(num_blocks=64, step_seconds=0.005)  # 1,024 tokens
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        for n in range(12):
            await put(queue, prompt=f"{n:02}" * 100, max_tokens=200)
        for _ in range(100):
            assert worker.leases.kv_need <= 1024
            await asyncio.sleep(0.005)
        assert 0 < len(worker.leases) <= 2 + 2, "200 of prompt and up to 200 of output each"


async def test_counts_a_shared_prefix_once(redis_url: str, queue: AsyncRequestQueue) -> None:
    served = served_model_free(num_blocks=64, step_seconds=0.05)  # 1,024 tokens
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        requests = [await put(queue, prompt="x" * 400, max_tokens=24) for _ in range(12)]
        while worker.engine.stats.num_running < 8:  # 2 would fit with prefixes of their own
            assert not worker.engine.stats.num_processed
            await asyncio.sleep(0.005)
        for request_id in requests:
            assert (await finished(queue, request_id))["finish_reason"] == "length"
        assert not worker.engine.stats.num_preemptions


class FailingRunner(ModelFreeRunner):
    """Does nothing any more once it has met the token `!`."""

    is_broken = False

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        if any(ord("!") in share.sequence.token_ids for share in batch.scheduled):
            self.is_broken = True
        if self.is_broken:
            raise RuntimeError("device-side assert")
        return super().launch(batch, after)


async def test_what_makes_engines_fail_becomes_a_dead_letter(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Else it would go from worker to worker for ever."""
    request_id = await put(queue, prompt="!")
    for _ in range(2):
        engine = LLMEngine(FailingRunner(), max_num_seqs=4, max_num_batched_tokens=64)
        served = replace(served_model_free(), engine=engine)
        async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
            worker = Worker(Settings(lease_ms=1000, max_crashes=2), served, client)
            await worker.start()
            with pytest.raises(RuntimeError, match="device-side assert"):
                await worker.serve(asyncio.Event())
            untouched = await put(queue, prompt="waits")
            await worker.stop()
        assert await queue.state(untouched) is RequestState.WAITING
        await queue.remove(untouched)
    async with running_worker(redis_url, lease_ms=1000, max_crashes=2):
        result = await finished(queue, request_id)
    assert result["error"]["type"] == "dead_letter"


async def test_a_failing_engine_gives_back_at_once_what_it_was_running(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Counted as a crash of each, with no wait for leases to run out."""
    innocent = await put(queue, prompt="a", seed=3, max_tokens=50)
    engine = LLMEngine(FailingRunner(step_seconds=0.01), max_num_seqs=4, max_num_batched_tokens=64)
    served = replace(served_model_free(), engine=engine)
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        worker = Worker(Settings(), served, client)
        await worker.start()
        await until_tokens(queue, innocent, 3)
        poison = await put(queue, prompt="!")
        with pytest.raises(RuntimeError, match="device-side assert"):
            await worker.serve(asyncio.Event())
        await worker.stop()
    for request_id in (innocent, poison):
        assert await queue.state(request_id) is RequestState.WAITING
        record = await queue.run(lookups.record(queue.keys, request_id))
        assert record["crashes"] == "1"
    await queue.remove(poison)
    async with running_worker(redis_url):
        assert (await finished(queue, innocent))["text"] == text_of(3, 50)


async def test_a_suspect_has_its_worker_to_itself(redis_url: str, queue: AsyncRequestQueue) -> None:
    """Others wait until it is done, be they more urgent, and then run together."""
    served = served_model_free(step_seconds=0.005)
    suspect = await put(queue, seed=1, max_tokens=60)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.hset(queue.keys.request(suspect), "suspect", 1)
    async with running_worker(redis_url, served) as worker:
        await until_tokens(queue, suspect, 3)
        others = [await put(queue, seed=n, max_tokens=5, priority=-n) for n in range(5)]
        while await queue.state(suspect) is RequestState.ACTIVE:
            assert len(worker.leases) <= 1
            await asyncio.sleep(0.002)
        for n, request_id in enumerate(others):
            assert (await finished(queue, request_id))["text"] == text_of(n, 5)
    assert (await finished(queue, suspect))["text"] == text_of(1, 60)


async def test_a_suspect_gets_its_turn_at_a_busy_worker(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(max_num_seqs=2, step_seconds=0.001)
    async with running_worker(redis_url, served, prefetch_depth=0) as worker:
        first = await put(queue, max_tokens=200)
        await until_tokens(queue, first, 1)
        suspect = new_request_id()
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.hset(queue.keys.request(suspect), "suspect", 1)
        request = Request.build({"prompt": "a", "max_tokens": 20})
        new = [NewRequest(new_request_id(), request) for _ in range(60)]
        _, *others = await queue.enqueue([NewRequest(suspect, request), *new])
        while not (state := await queue.state(suspect)) or not state.is_final:
            assert state is not RequestState.ACTIVE or len(worker.leases) <= 1
            await asyncio.sleep(0.0005)
        states = [await queue.state(request_id) for request_id in others]
        assert RequestState.WAITING in states, "it was not left to the end"
        for request_id in others:
            await finished(queue, request_id)


@pytest.mark.parametrize("message", ["drain", "drain:{worker_id}"])
async def test_a_message_drains_the_worker_that_it_names(
    redis_url: str, queue: AsyncRequestQueue, message: str
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        worker = Worker(Settings(), served_model_free(step_seconds=0.005), client)
        await worker.start()
        serving = asyncio.create_task(worker.serve(asyncio.Event()))
        request_id = await put(queue, seed=2, max_tokens=40)
        await until_tokens(queue, request_id, 3)
        await client.publish(queue.keys.drain, "drain:another")
        await asyncio.sleep(0.05)
        assert not serving.done()
        await client.publish(queue.keys.drain, message.format(worker_id=worker.worker_id))
        await serving
        await worker.drain(asyncio.Event())
        await worker.stop()
    assert (await finished(queue, request_id))["text"] == text_of(2, 40)


@pytest.mark.parametrize(("role", "channel"), [("worker", "drain"), ("", "control")])
async def test_a_worker_listens_on_a_server_that_has_no_command_acl(
    tmp_path: Path, role: str, channel: str
) -> None:
    """Managed servers have none, and others take it from everybody."""
    server = OwnServer(tmp_path, "--rename-command", "ACL", "")
    try:
        async with redis.asyncio.Redis.from_url(as_role(role, server.url)) as client:
            worker = Worker(Settings(), served_model_free(), client)
            await worker.start()
            serving = asyncio.create_task(worker.serve(asyncio.Event()))
            while not serving.done():
                await client.publish(f"promptq:{{default}}:{channel}", "drain")
                await asyncio.sleep(0.01)
            await worker.stop()
    finally:
        server.kill()


async def test_a_cancel_that_fails_does_not_end_the_worker(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    async with running_worker(redis_url, served_model_free(step_seconds=0.005)):
        await client.set(queue.keys.leases, "of another type")
        await client.publish(queue.keys.control, "cancel:somebody")
        await asyncio.sleep(0.1)
        await client.delete(queue.keys.leases)
        request_id = await put(queue, max_tokens=3000)
        await until_tokens(queue, request_id, 3)
        await queue.cancel(request_id)
        assert (await finished(queue, request_id))["finish_reason"] == "cancelled"
    await client.aclose()


async def test_a_log_that_was_deleted_is_written_anew(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    served = served_model_free(step_seconds=0.005)
    async with running_worker(redis_url, served):
        request_id = await put(queue, seed=4, max_tokens=100)
        await until_tokens(queue, request_id, 5)
        await client.delete(queue.keys.tokens(request_id))
        assert (await finished(queue, request_id))["text"] == text_of(4, 100)
    record = await queue.run(lookups.record(queue.keys, request_id))
    assert (record["attempt"], record.get("crashes")) == ("1", None), "its worker sends it again"
    await client.aclose()


async def test_a_request_whose_hash_was_deleted_is_let_go_and_ends(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    served = served_model_free(step_seconds=0.005)
    async with running_worker(redis_url, served, lease_ms=400):
        request_id = await put(queue, max_tokens=5000)
        await until_tokens(queue, request_id, 5)
        await client.delete(queue.keys.request(request_id))
        assert (await finished(queue, request_id))["finish_reason"] == "error"
    await client.aclose()


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
        good, bad = await put(queue, seed=6, max_tokens=50), await put(queue, prompt="why?")
        result = await finished(queue, bad)
        assert result["finish_reason"] == "error"
        assert result["error"] == {"type": "internal_error", "message": "no finite logits"}
        assert (await finished(queue, good))["text"] == text_of(6, 50)


class BundlingEngine:
    """Gives the outputs of three steps at once, as an engine that drafts tokens would."""

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
            request_id = await put(queue, seed=7, max_tokens=40, stop=stop, logprobs=1)
            result = await finished(queue, request_id)
            assert (result["text"], result["finish_reason"]) == (whole[:cut], "stop")
            assert len(result["token_ids"]) == cut + 2
            assert [item["token_id"] for item in result["logprobs"]] == result["token_ids"]


async def test_drafted_tokens_come_in_one_event_and_change_none(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 60)
    served = served_model_free(speculative_tokens=7)
    async with running_worker(redis_url, served, **BY_ITSELF) as worker:
        fields = {"prompt": f"0{whole}1", "seed": 7, "max_tokens": 60, "logprobs": 1}
        drafted, plain = (
            await put(queue, **fields),
            await put(queue, **fields, speculative_tokens=0),
        )
        stop = whole[31:34]
        stopped = await put(queue, **fields, stop=stop)
        results = [await finished(queue, request_id) for request_id in (drafted, plain, stopped)]
        assert [each["text"] for each in results] == [whole, whole, whole[: whole.index(stop)]]
        assert results[0]["token_ids"] == results[1]["token_ids"]
        for result in results:
            assert [item["token_id"] for item in result["logprobs"]] == result["token_ids"]
        events = {each: await log_of(queue, each) for each in (drafted, plain)}
        assert len(events[plain]) == 60
        assert len(events[drafted]) < 40
        for log in events.values():
            assert indices(log) == [0, *ends(log)[:-1]]
        stats = worker.stats()
        assert stats.drafted_tokens >= stats.accepted_tokens > 20


async def test_many_streams_get_some_tokens_an_event_but_the_first_at_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(step_seconds=0.002)
    async with running_worker(redis_url, served, max_events_per_second=200) as worker:
        fields = {"max_tokens": 60, "logprobs": 0}
        requests = [await put(queue, seed=n, **fields) for n in range(20)]
        stop = text_of(7, 60)[40:43]
        stopping = await put(queue, seed=7, **fields, stop=stop)
        for n, request_id in enumerate(requests):
            result = await finished(queue, request_id)
            assert result["text"] == text_of(n, 60)
            assert [each["token_id"] for each in result["logprobs"]] == result["token_ids"]
            events = await log_of(queue, request_id)
            assert indices(events) == [0, *ends(events)[:-1]]
            assert len(events[0]["token_ids"]) == 1
            assert len(events) < 30
        result = await finished(queue, stopping)
        assert result["text"] == text_of(7, 60).split(stop)[0]
        events = await log_of(queue, stopping)
        assert len(events) > 35  # each token is looked at as it comes
        counts, _ = worker.meter.histograms[BETWEEN_TOKENS].exposed()
        assert counts[-1][1] >= 20 * 59, "what the engine needs for a token is measured by step"


async def test_tokens_that_wait_for_others_are_sent_though_no_step_follows(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """As when a request is preempted, or a step takes long."""
    runner = PausingRunner()
    async with running_worker(redis_url, served_by(runner), max_events_per_second=1) as worker:
        request_id = await put(queue, seed=3, max_tokens=40)
        try:
            await until_tokens(queue, request_id, 11)
            assert await num_tokens(queue, request_id) == 11
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
        request_id = await put(queue, seed=3, max_tokens=40)
        await asyncio.to_thread(runner.has_paused.wait)
        assert await num_tokens(queue, request_id) < 11
        asyncio.get_running_loop().call_later(0.2, runner.may_go_on.set)
    assert await queue.state(request_id) is RequestState.WAITING
    assert await num_tokens(queue, request_id) >= 11


@pytest.mark.parametrize("error", [RuntimeError("broken"), TimeoutError("broken")])
async def test_tokens_that_wait_for_others_are_sent_before_a_failure_ends_the_worker(
    redis_url: str, queue: AsyncRequestQueue, never_due: dict[str, float], error: Exception
) -> None:
    """Whatever the engine fails with, even what a timer would say."""
    runner = PausingRunner(error)
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        worker = Worker(Settings(**never_due), served_by(runner), client)
        await worker.start()
        request_id = await put(queue, seed=3, max_tokens=40)
        await asyncio.to_thread(runner.has_paused.wait)
        runner.may_go_on.set()
        with pytest.raises(type(error), match="broken"):
            await worker.serve(asyncio.Event())
        assert await num_tokens(queue, request_id) == 11
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
        request_id = await put(queue, seed=7, max_tokens=200, stop=stop)
        result = await finished(queue, request_id)
        counts, _ = worker.meter.histograms[BETWEEN_TOKENS].exposed()
        assert counts[-1][1] == len(result["token_ids"]) - 1


async def test_a_stop_string_that_never_comes_holds_nothing_back_in_the_end(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    whole = text_of(7, 30)
    async with running_worker(redis_url):
        request_id = await put(queue, seed=7, max_tokens=30, stop=whole[-3:] + "never")
        assert (await finished(queue, request_id))["text"] == whole


async def test_a_payload_that_fails_after_an_attempt_ends_behind_what_was_emitted(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    request_id = await put(queue, seed=1, max_tokens=1000)
    async with running_worker(redis_url, served_model_free(step_seconds=0.005), drain_seconds=0):
        await until_tokens(queue, request_id, 5)
    so_far = await num_tokens(queue, request_id)
    async with running_worker(redis_url, served_model_free(max_model_len=10)):
        result = await finished(queue, request_id)
    assert result["finish_reason"] == "error"
    assert result["error"]["message"].startswith("prompt: ")
    assert result["text"] == text_of(1, so_far)
    assert (await log_of(queue, request_id))[-1]["index"] == so_far


async def test_a_second_signal_ends_a_drain_at_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        served = served_model_free(step_seconds=0.01)
        worker = Worker(Settings(drain_seconds=3600), served, client)
        await worker.start()
        request_id = await put(queue, max_tokens=4000)
        await until_tokens(queue, request_id, 2)
        now = asyncio.Event()
        draining = asyncio.create_task(worker.drain(now))
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert worker.stats().state == "draining"
        now.set()
        await draining
        await worker.stop()
    assert await queue.state(request_id) is RequestState.WAITING
