"""Workers that share a queue, with each other and with whoever changes it by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from promptq.shared.errors import ModelMismatchError
from promptq.shared.protocol.claims import Held, ModelIdentity, Room
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.worker import Worker
from tests.support.model_free import finished, running_worker, served_model_free, text_of
from tests.support.requests import async_log_of, async_put, until_tokens
from tests.support.roles import as_role
from tests.support.servers import OwnServer
from tests.support.waiting import async_until


async def test_two_workers_share_a_queue(redis_url: str, queue: AsyncRequestQueue) -> None:
    slow = {"max_num_seqs": 2, "step_seconds": 0.002}
    async with (
        running_worker(redis_url, served_model_free(**slow)) as one,
        running_worker(redis_url, served_model_free(**slow)) as two,
    ):
        requests = [await async_put(queue, seed=n, max_tokens=20) for n in range(30)]
        for n, request_id in enumerate(requests):
            assert (await finished(queue, request_id))["text"] == text_of(n, 20)
        assert one.engine.stats.num_processed + two.engine.stats.num_processed == 30
        assert min(one.engine.stats.num_processed, two.engine.stats.num_processed) > 0


async def test_a_worker_whose_lease_was_taken_lets_go(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url, served_model_free(step_seconds=0.01)) as worker:
        request_id = await async_put(queue, seed=5, max_tokens=100)
        await until_tokens(queue, request_id, 3)
        # Another attempt took it over: the fence is not this worker's any more.
        await queue.redis.hset(queue.keys.request(request_id), "fence", "2-other")
        await async_until(lambda: not worker.served.engine.stats.num_used_blocks)
        await async_until(lambda: not len(worker.leases))
        written = len(await async_log_of(queue, request_id))
        await asyncio.sleep(0.05)
        assert len(await async_log_of(queue, request_id)) == written


async def test_a_worker_finds_work_whose_wake_up_it_missed(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url):
        await asyncio.sleep(0.1)
        await queue.redis.hset(
            queue.keys.request("silent"), "payload", '{"prompt":"a","max_tokens":2}'
        )
        await queue.redis.zadd(queue.keys.pending, {"silent": 1})
        assert (await finished(queue, "silent"))["finish_reason"] == "length"


async def test_a_worker_reports_its_state(redis_url: str, queue: AsyncRequestQueue) -> None:
    async with running_worker(redis_url) as worker:
        await finished(queue, await async_put(queue, max_tokens=5))
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
    await queue.redis.zadd(queue.keys.workers, {worker_id: 2**52})
    await queue.redis.hset(queue.keys.worker("stranger"), "max_model_len", "nonsense")
    async with running_worker(redis_url):
        assert (await finished(queue, await async_put(queue, seed=1, max_tokens=5)))[
            "text"
        ] == text_of(1, 5)


async def test_a_worker_of_another_model_refuses_to_start(redis_url: str) -> None:
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
    request_id = await async_put(queue, seed=9, max_tokens=5)
    claim = await queue.take(timeout=5)
    assert claim is not None
    async with running_worker(redis_url):
        await queue.release([Held(request_id, claim.fence)])
        assert (await finished(queue, request_id))["text"] == text_of(9, 5)


async def test_a_worker_that_claims_its_own_lost_request_runs_it_once(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(step_seconds=0.03)
    async with running_worker(redis_url, served, drain_seconds=0) as worker:
        request_id = await async_put(queue, seed=2, max_tokens=30)
        await until_tokens(queue, request_id, 2)
        await queue.redis.zadd(queue.keys.leases, {request_id: 1})
        assert (await queue.reap()).returned == 1
        result = await finished(queue, request_id)
        assert result["text"] == text_of(2, 30)
        assert result["stats"]["attempts"] == 2
        assert worker.meter.num_fences_lost == 1
        await async_until(lambda: not (worker.leases.num_running or worker.served.engine.has_work))


async def test_leases_are_kept_for_as_long_as_it_takes(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Of what runs, what waits inside the engine and what lies ready."""
    served = served_model_free(max_num_seqs=1, step_seconds=0.02)
    async with running_worker(redis_url, served, lease_ms=600, prefetch_depth=2):
        requests = [await async_put(queue, seed=n, max_tokens=60) for n in range(4)]
        for n, request_id in enumerate(requests):
            result = await finished(queue, request_id)
            assert result["text"] == text_of(n, 60)
            assert result["stats"]["attempts"] == 1


@pytest.mark.parametrize(("role", "channel"), [("worker", "drain"), ("", "control")])
async def test_a_worker_listens_on_a_server_that_has_no_command_acl(
    tmp_path: Path, role: str, channel: str
) -> None:
    """Managed servers have none, and others take it from everybody."""
    server = OwnServer(tmp_path, "--rename-command", "ACL", "")
    try:
        async with redis.asyncio.Redis.from_url(as_role(role, server.url)) as client:
            worker = Worker(WorkerSettings(), served_model_free(), client)
            await worker.start()
            serving = asyncio.create_task(worker.serve(asyncio.Event()))
            while not serving.done():
                await client.publish(f"promptq:{{default}}:{channel}", "drain")
                await asyncio.sleep(0.01)
            await worker.stop()
        assert serving.exception() is None, "it ended because it heard of the drain"
    finally:
        server.kill()


async def test_a_log_that_was_deleted_is_written_anew(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(step_seconds=0.005)
    async with running_worker(redis_url, served):
        request_id = await async_put(queue, seed=4, max_tokens=100)
        await until_tokens(queue, request_id, 5)
        await queue.redis.delete(queue.keys.tokens(request_id))
        assert (await finished(queue, request_id))["text"] == text_of(4, 100)
    record = await queue.run(lookups.record(queue.keys, request_id))
    assert (record["attempt"], record.get("crashes")) == ("1", None), "its worker sends it again"


async def test_a_request_whose_hash_was_deleted_is_let_go_and_ends(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(step_seconds=0.005)
    async with running_worker(redis_url, served, lease_ms=400):
        request_id = await async_put(queue, max_tokens=5000)
        await until_tokens(queue, request_id, 5)
        await queue.redis.delete(queue.keys.request(request_id))
        assert (await finished(queue, request_id))["finish_reason"] == "error"


async def test_a_report_that_was_deleted_is_complete_again(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Most reports have only what changed."""
    async with running_worker(redis_url) as worker:
        read = lookups.worker_stats(queue.keys, worker.worker_id)
        before = await queue.run(read)
        assert before is not None

        async def has_beaten_again() -> bool:
            now = await queue.run(read)
            return now is not None and now.heartbeat_at > before.heartbeat_at

        await async_until(has_beaten_again)
        await queue.redis.delete(queue.keys.worker(worker.worker_id))
        after = await async_until(lambda: queue.run(read))
        for name in ("model", "pid", "max_num_seqs", "kv_tokens", "started_at_ms"):
            assert getattr(after, name) == getattr(before, name)
