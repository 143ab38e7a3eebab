"""Views for people: an overview, a worker's batch, a request's life, the last hour."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from promptq import AsyncClient
from promptq.producer.admin.timeline import Happened, Timeline
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import RequestState
from promptq.shared.protocol.worker_stats import SAMPLE_MS, SlotState, WorkerStats
from promptq.shared.queue import scripts, statistics
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.statistics import Contribution
from tests.producer.playing import KEYS
from tests.support.model_free import running_worker, served_model_free
from tests.support.roles import as_role
from tests.support.servers import Server, counted_round_trips
from tests.support.waiting import async_until


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url) as opened:
        yield opened


def happenings(timeline: Timeline) -> list[Happened]:
    return [moment.what for moment in timeline.moments]


async def test_a_waiting_request_shows_why_no_worker_claims_it(
    redis_url: str, client: AsyncClient
) -> None:
    request_id = await client.enqueue("Once")

    async def because() -> str:
        return (await client.timeline(request_id)).waits_because

    assert re.fullmatch(
        r"no worker is alive \(.*\); start one with `promptq worker`", await because()
    )
    async with AsyncClient(redis_url, "chat") as chat:
        await chat.pause()
        resume = "`promptq resume --queue chat` ends the pause"
        assert (await chat.stats()).why_waiting() == f"the queue is paused; {resume}"
    for state, said in (
        ("draining", "no worker claims requests; their states: draining"),
        ("running", ""),
    ):
        stats = WorkerStats(worker_id=state, state=state)
        await AsyncRequestQueue(client.queue.redis).run(scripts.heartbeat(stats, 60_000))
        assert await because() == said


async def test_a_workers_slots_show_running_requests_and_their_progress(
    redis_url: str, client: AsyncClient
) -> None:
    """Requests with one prompt share its blocks, which the worker counts once."""
    served = served_model_free(max_num_seqs=4, step_seconds=0.005, block_size=4)
    began = time.monotonic()
    async with running_worker(redis_url, served) as worker:
        prompt = "a prompt of five blocks"  # 23 tokens
        first = await client.enqueue(prompt, max_tokens=900, tenant="gold", priority=-2)
        await anext(client.stream(first))
        second = await client.enqueue(prompt, max_tokens=900, tenant="gold")
        await anext(client.stream(second))

        async def both_run() -> Any:
            view = await client.worker(worker.worker_id)
            return view if len(view.slots) == 2 and view.slots[0].emitted_tokens > 20 else None

        view = await async_until(both_run)
        by_id = {slot.request_id: slot for slot in view.slots}
        one, other = by_id[first], by_id[second]
        assert {one.slot, other.slot} == {0, 1}
        assert (one.tenant, one.priority, one.attempt) == ("gold", -2, 1)
        assert (one.prompt_tokens, one.max_tokens) == (23, 900)
        assert one.state is other.state is SlotState.DECODE
        assert one.computed_tokens == one.prompt_tokens + one.emitted_tokens - 1
        assert one.kv_blocks >= -(-one.computed_tokens // 4)
        assert one.kv_shared_blocks == other.kv_shared_blocks == 5
        assert (one.cached_tokens, other.cached_tokens) == (0, 20)
        assert view.stats.kv_shared_blocks == 5
        assert view.stats.kv_blocks == view.stats.kv_used_blocks + view.stats.kv_free_blocks
        assert 5 <= view.stats.step_ms < (time.monotonic() - began) * 1000
        assert view.stats.recent_tokens_per_second > 0
        assert one.claimed_at <= (one.prefill_at or 0) <= (one.first_token_at or 0) <= view.told_at
        for request_id in (first, second):
            await client.cancel(request_id)
    with pytest.raises(RequestNotFoundError):
        await client.worker(worker.worker_id)
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        assert not await connection.exists(Keys().slots(worker.worker_id))


async def test_a_preempted_request_is_shown_without_a_slot_and_its_life_tells_of_it(
    redis_url: str, client: AsyncClient
) -> None:
    served = served_model_free(max_num_seqs=1, step_seconds=0.005)
    async with running_worker(redis_url, served) as worker:
        lazy = await client.enqueue("lazy", priority=5, max_tokens=350)
        await anext(client.stream(lazy))
        urgent = await client.enqueue("urgent", priority=-5, max_tokens=3000)

        async def preempted() -> Any:
            slots = (await client.worker(worker.worker_id)).slots
            return [(it.request_id, it.state) for it in slots] == [
                (urgent, SlotState.DECODE),
                (lazy, SlotState.PREEMPTED),
            ]

        await async_until(preempted)
        running = await client.timeline(lazy)
        assert running.state is RequestState.ACTIVE
        assert running.slot is not None
        assert happenings(running) == [
            Happened.ENQUEUED,
            Happened.CLAIMED,
            Happened.PREFILL,
            Happened.FIRST_TOKEN,
            Happened.PREEMPTED,
        ]
        await client.cancel(urgent)

        async def resumed() -> Any:
            return Happened.RESUMED in happenings(await client.timeline(lazy))

        await async_until(resumed)
        await client.result(lazy)
        ended = await client.timeline(lazy)
        assert happenings(ended) == [*happenings(running), Happened.RESUMED, Happened.FINISHED]
        assert [it.at for it in ended.moments] == sorted(it.at for it in ended.moments)
        assert ended.moments[-1].detail == "length"
        assert {it.worker for it in ended.moments[1:]} == {worker.worker_id}
        # An ended request's prefill is dated back from the time when its first token was published.
        published_at = running.moments[3].at
        late_ms = published_at - (running.slot.first_token_at or 0)
        for before, after in zip(running.moments, ended.moments, strict=False):
            assert abs(before.at - after.at) <= late_ms + 5, before.what


async def test_a_life_of_several_attempts(redis_url: str, client: AsyncClient) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        queue = AsyncRequestQueue(connection, worker_id="first", lease_ms=100)
        request_id = await client.enqueue("Once", max_tokens=3)
        room = Room(max_count=1, token_budget=1000)
        await queue.take_batch(room)  # and crashes
        await asyncio.sleep(0.15)
        await queue.reap()
        claim = (await queue.take_batch(room))[0]
        await queue.release([Held(claim.request_id, claim.fence)])
    assert happenings(await client.timeline(request_id)) == [
        Happened.ENQUEUED,
        Happened.CLAIMED,
        Happened.CRASHED,
        Happened.CLAIMED,
        Happened.GIVEN_BACK,
    ]
    async with running_worker(redis_url) as worker:
        await client.result(request_id)
    timeline = await client.timeline(request_id)
    assert happenings(timeline)[5:] == [
        Happened.CLAIMED,
        Happened.PREFILL,
        Happened.FIRST_TOKEN,
        Happened.FINISHED,
    ]
    assert [it.attempt for it in timeline.moments] == [0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert timeline.moments[5].worker == worker.worker_id
    with pytest.raises(RequestNotFoundError):
        await client.timeline("unknown")


async def test_a_life_keeps_its_order_where_the_last_event_was_taken_late(
    redis_url: str, client: AsyncClient
) -> None:
    async with running_worker(redis_url):
        request_id = await client.enqueue("Once", max_tokens=3)
        await client.result(request_id)
    before = await client.timeline(request_id)
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        late = before.moments[-1].at + 5000
        await connection.hset(Keys().request(request_id), "finished_at", late)
    after = await client.timeline(request_id)
    assert happenings(after) == happenings(before)
    assert after.moments[:-1] == before.moments[:-1]


async def test_an_overview_counts_what_waits_by_priority(
    redis_url: str, client: AsyncClient
) -> None:
    for priority, num in [(0, 3), (-5, 2), (7, 1)]:
        for _ in range(num):
            await client.enqueue("Once", priority=priority, tenant="gold" if num > 1 else None)
    async with redis.asyncio.Redis.from_url(redis_url) as plain:
        payload = '{"prompt":"x","priority": 7}'
        await plain.hset("promptq:{default}:request:plain", "payload", payload)
        await plain.zadd("promptq:{default}:pending", {"plain": 1})
    overview = await client.overview()
    assert overview.priorities == {-5: 2, 0: 3, 7: 2}
    assert (overview.waiting, overview.running, overview.latest) == (7, 0, None)
    assert list(overview.priorities) == [-5, 0, 7]


@pytest.mark.parametrize("num_workers", [0, 40])
async def test_looking_takes_as_many_round_trips_however_many_workers_there_are(
    redis_url: str, client: AsyncClient, num_workers: int
) -> None:
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as connection:
        workers = AsyncRequestQueue(connection)
        names = {f"w{n}" for n in range(num_workers)}
        await workers.run(
            [scripts.heartbeat(WorkerStats(worker_id=name), ttl_ms=60_000) for name in names]
        )
    await client.overview()  # from now on the server knows the scripts
    with counted_round_trips() as sent:
        stats = await client.stats()
    assert {worker.worker_id for worker in stats.workers} == names
    assert len(sent) <= 3
    with counted_round_trips() as sent:
        await client.overview()
    assert len(sent) <= 4


async def test_dead_letters_are_read_by_the_hundred(redis_url: str, client: AsyncClient) -> None:
    """Dead letters that were purged after their ids were read are left out."""
    names = [f"d{n:03}" for n in range(205)]
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as connection:
        await connection.zadd(KEYS.dead, {name: n for n, name in enumerate(names)})
        for name in names[1:]:
            fields: Any = {"state": "dead", "payload": "{}", "finished_at": 7}
            await connection.hset(KEYS.request(name), mapping=fields)
    with counted_round_trips() as sent:
        letters = await client.dead_letters(1000)
    assert [it.request_id for it in letters] == names[:0:-1]
    assert letters[0].buried_at == 7
    assert len(sent) <= 1 + 3


async def test_of_a_long_queue_the_front_is_counted_and_the_rest_estimated(
    redis_url: str, client: AsyncClient
) -> None:
    many = [{"prompt": "x", "priority": 3 if n % 4 else 1} for n in range(4000)]
    await client.enqueue_many([*many, *({"prompt": "x", "priority": -9} for _ in range(3))])
    counts = (await client.overview()).priorities
    assert counts[-9] == 3
    assert sum(counts.values()) == pytest.approx(4003, abs=5)
    assert counts[1] == pytest.approx(1000, rel=0.15)


async def test_several_writers_make_one_sample_for_each_five_seconds(server: Server) -> None:
    connection = server.connect_async()
    queue = AsyncRequestQueue(connection)
    part = Contribution(
        generated_tokens=50, finished=1, first_token_ms=[100] * 9 + [1000], queue_ms=[10]
    )
    # A sample that was begun long ago by others, and is over.
    opened = {"bucket": 1_000_000, "waiting": 4, "priorities": '{"-1":1,"0":3}', "delayed": 0}
    opened |= {"active": 2, "running": 2, "workers": 2}
    assert await queue.run(statistics.sample(part)) == 0
    await connection.hset(f"{queue.keys.statistics}:open", mapping=opened)
    for _ in range(2):  # the first of the next five seconds writes it, the other does not
        await queue.run(statistics.sample(part))
    found = await queue.run(statistics.samples(queue.keys, 0))
    assert len(found) == 1
    sample = found[0]
    assert (sample.at, sample.waiting, sample.priorities) == (1_000_000, 4, {-1: 1, 0: 3})
    assert (sample.workers, sample.running, sample.finished) == (2, 2, 1)
    assert sample.tokens_per_second == 50 / (SAMPLE_MS / 1000)
    assert sample.ttft_p50_ms == pytest.approx(100, rel=0.03)
    assert sample.ttft_p95_ms == pytest.approx(1000, rel=0.03)
    assert sample.queue_p50_ms == pytest.approx(10, rel=0.03)
    assert await queue.run(statistics.samples(queue.keys, 1_000_001)) == []
    await connection.aclose()


async def test_a_working_worker_fills_the_statistics(redis_url: str, client: AsyncClient) -> None:
    open_sample = "promptq:{default}:statistics:open"
    async with (
        running_worker(redis_url),
        redis.asyncio.Redis.from_url(redis_url) as connection,
    ):
        for _ in range(3):
            await client.result(await client.enqueue("Once", max_tokens=10))

        async def sampled() -> Any:
            """The samples once they hold all three; what is being summed up is over at once."""
            samples = await client.statistics()
            if sum(sample.finished for sample in samples) >= 3:
                return samples
            part = await connection.hgetall(open_sample)
            if b"finished" in part:
                await connection.hset(open_sample, "bucket", int(part[b"bucket"]) - 1)
            return None

        samples = await async_until(sampled)
        assert (await client.overview()).latest in await client.statistics()
    assert sum(sample.finished for sample in samples) == 3
    assert sum(sample.tokens_per_second * 5 for sample in samples) == pytest.approx(30)
    told = next(sample for sample in samples if sample.ttft_p50_ms is not None)
    assert told.queue_p50_ms is not None
    assert told.queue_p95_ms is not None
    assert told.queue_p50_ms <= told.ttft_p50_ms


async def test_without_workers_whoever_keeps_the_statistics_going_shows_what_waits(
    redis_url: str, client: AsyncClient
) -> None:
    await client.enqueue("Once", priority=4)
    await client.keep_statistics()
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        await connection.hset("promptq:{default}:statistics:open", "bucket", 1_000_000)
    await client.keep_statistics()
    (sample,) = await client.statistics()
    assert (sample.waiting, sample.priorities, sample.workers) == (1, {4: 1}, 0)
    assert (sample.tokens_per_second, sample.ttft_p50_ms) == (0, None)
