"""Leases that ran out while nobody could renew them prove no crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from promptq.shared.protocol.claims import Held, Room
from promptq.shared.protocol.request import NewRequest, Request, RequestState
from promptq.shared.queue import lookups
from promptq.shared.queue.call import Call
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.worker.health.reaper import Reaper
from tests.support.roles import AsyncQueueClient, as_role
from tests.support.waiting import Clock, async_until

LEASE_SECONDS = 10.0


class Unreachable(AsyncRequestQueue):
    is_away = False
    is_back: asyncio.Event | None = None
    """If given, a call during an outage waits for this event, as a call with retries does."""
    num_answers = 0
    """Number of calls that the server still answers before the outage."""

    async def run(self, call: Call[Any]) -> Any:
        if self.num_answers:
            self.num_answers -= 1
            return await super().run(call)
        if self.is_away and self.is_back is None:
            raise RedisConnectionError("nobody answers")
        if self.is_away and self.is_back is not None:
            await self.is_back.wait()
        return await super().run(call)


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[Unreachable]:
    async with AsyncQueueClient.from_url(as_role("", redis_url)) as client:
        yield Unreachable(client, lease_ms=int(LEASE_SECONDS * 1000))


async def held_past_its_lease(queue: AsyncRequestQueue, redis_url: str) -> str:
    request = NewRequest(new_request_id(), Request.build({"prompt": "a"}))
    (request_id,) = await queue.enqueue([request])
    await queue.take_batch(Room(1, 10**6))
    async with AsyncQueueClient.from_url(as_role("", redis_url)) as client:
        await client.zadd(queue.keys.leases, {request_id: 1})
    return request_id


async def beat(
    reaper: Reaper, clock: Clock, quarters: int, lease_seconds: float = LEASE_SECONDS
) -> None:
    for _ in range(quarters):
        clock.now += lease_seconds / 4
        await reaper.run_once()


async def test_reaps_several_times_a_lease(queue: Unreachable, redis_url: str) -> None:
    clock = Clock()
    reaper = Reaper(queue, clock)
    await beat(reaper, clock, 3)
    request_id = await held_past_its_lease(queue, redis_url)
    await beat(reaper, clock, 1)
    assert await queue.state(request_id) is RequestState.WAITING
    assert (await queue.run(lookups.record(queue.keys, request_id)))["crashes"] == "1"


@pytest.mark.parametrize("cause", ["server away", "frozen"])
async def test_gives_others_time_to_renew_after_an_outage(
    queue: Unreachable, redis_url: str, cause: str
) -> None:
    clock = Clock()
    reaper = Reaper(queue, clock)
    await beat(reaper, clock, 3)
    request_id = await held_past_its_lease(queue, redis_url)
    if cause == "frozen":
        clock.now += 3 * LEASE_SECONDS
    else:
        queue.is_away = True
        for _ in range(12):
            with pytest.raises(RedisConnectionError):
                await beat(reaper, clock, 1)
        queue.is_away = False
    await beat(reaper, clock, 2)
    assert await queue.state(request_id) is RequestState.ACTIVE, "its holder may still renew"
    await beat(reaper, clock, 2)
    assert await queue.state(request_id) is RequestState.WAITING


async def test_gives_others_time_to_renew_where_it_has_just_started(
    queue: Unreachable, redis_url: str
) -> None:
    """The reaper may have started because the server is back."""
    request_id = await held_past_its_lease(queue, redis_url)
    clock = Clock()
    reaper = Reaper(queue, clock)
    await reaper.run_once()
    await beat(reaper, clock, 1)
    assert await queue.state(request_id) is RequestState.ACTIVE, "its holder may still renew"
    await beat(reaper, clock, 1)
    assert await queue.state(request_id) is RequestState.WAITING


async def test_gives_others_time_to_renew_after_the_server_refused_writes(
    queue: Unreachable, redis_url: str
) -> None:
    """For example, its disk was full, or it was a replica during a failover."""
    clock = Clock()
    reaper = Reaper(queue, clock)
    await beat(reaper, clock, 3)
    request_id = await held_past_its_lease(queue, redis_url)
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as admin:
        await admin.config_set("min-replicas-to-write", 1)
        try:
            for _ in range(12):
                with pytest.raises(RedisError):
                    await beat(reaper, clock, 1)
        finally:
            await admin.config_set("min-replicas-to-write", 0)
    await beat(reaper, clock, 2)
    assert await queue.state(request_id) is RequestState.ACTIVE, "its holder may still renew"
    await beat(reaper, clock, 2)
    assert await queue.state(request_id) is RequestState.WAITING


@pytest.mark.parametrize(
    ("quarters", "num_answers"),
    [(1, 0), (3, 0), (3, 1)],
    ids=["patient", "before the lease", "before the reaping"],
)
async def test_no_call_from_before_an_outage_reaps_after_the_outage(
    redis_url: str, quarters: int, num_answers: int
) -> None:
    """The client repeats a call until the server is back."""
    lease_seconds, clock = 0.4, Clock()
    async with AsyncQueueClient.from_url(as_role("", redis_url)) as client:
        queue = Unreachable(client, lease_ms=int(lease_seconds * 1000))
        reaper = Reaper(queue, clock)
        await beat(reaper, clock, quarters, lease_seconds)
        request_id = await held_past_its_lease(queue, redis_url)
        queue.is_away, queue.is_back, queue.num_answers = True, asyncio.Event(), num_answers
        call = asyncio.create_task(reaper.run_once())
        await asyncio.wait([call], timeout=lease_seconds)
        clock.now += 3 * lease_seconds
        queue.is_back.set()
        await asyncio.wait([call])
        queue.is_away = False
        await reaper.run_once()
        assert await queue.state(request_id) is RequestState.ACTIVE, "its holder may still renew"
        await beat(reaper, clock, 3, lease_seconds)
        assert await queue.state(request_id) is RequestState.WAITING
        assert isinstance(call.exception(), RedisError if num_answers else type(None))


async def test_ends_all_that_is_overdue_in_one_turn(queue: Unreachable) -> None:
    clock = Clock()
    reaper = Reaper(queue, clock)
    overdue = Request.build({"prompt": "a", "deadline_ms": 1})
    ids = await queue.enqueue([NewRequest(new_request_id(), overdue) for _ in range(2500)])
    await beat(reaper, clock, 2)
    assert {await queue.state(request_id) for request_id in ids} == {RequestState.EXPIRED}


@pytest.mark.parametrize("end", ["leaves", "dies"])
async def test_one_worker_reaps_at_a_time_and_another_when_it_is_gone(
    redis_url: str, end: str
) -> None:
    lease_ms = 60_000 if end == "leaves" else 400
    clock = Clock()
    async with AsyncQueueClient.from_url(as_role("", redis_url)) as client:
        queues = [Unreachable(client, lease_ms=lease_ms) for _ in range(2)]
        first, second = (Reaper(queue, clock) for queue in queues)
        for _ in range(3):
            clock.now += lease_ms / 1000 / 4
            await first.run_once()
            await second.run_once()
        request_id = await held_past_its_lease(queues[0], redis_url)
        if end == "leaves":
            assert await client.get(queues[0].keys.reaper) == queues[0].worker_id.encode()
            await second.run_once()
            assert await queues[0].state(request_id) is RequestState.ACTIVE, "the first one reaps"
            await first.leave()

        async def second_reaps() -> bool:
            await second.run_once()
            return await queues[0].state(request_id) is RequestState.WAITING

        await async_until(second_reaps)


async def reaps_and_sweeps(redis_url: str, client: Any) -> bool:
    """Whether a worker that connects with this client lets go of an orphan, too."""
    queue = AsyncRequestQueue(client, lease_ms=int(LEASE_SECONDS * 1000))
    clock = Clock()
    reaper = Reaper(queue, clock)
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as other:
        await other.hset(queue.keys.request("never"), "cancelled", "1")
        await other.hset(queue.keys.config, "result_ttl_ms", "0")
        await beat(reaper, clock, 3)
        request_id = await held_past_its_lease(queue, redis_url)
        await beat(reaper, clock, 3)
        assert await queue.state(request_id) is RequestState.WAITING
        return not await other.exists(queue.keys.request("never"))


async def test_lets_go_of_what_nothing_refers_to(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(as_role("worker", redis_url)) as client:
        assert await reaps_and_sweeps(redis_url, client)


@pytest.mark.parametrize("kind", ["embedded_url", "redis_server_url"])
async def test_reaps_on_where_it_may_not_look_for_orphans(
    request: pytest.FixtureRequest, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers say it in different words."""
    redis_url = request.getfixturevalue(kind)
    rules = ["on", "nopass", "~*", "&*", "+@all", "-scan"]
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as admin:
        await admin.flushall()
        await admin.execute_command("ACL", "SETUSER", "narrow", *rules)
        narrow = as_role("", redis_url).replace("//", "//narrow:x@")
        async with redis.asyncio.Redis.from_url(narrow) as client:
            assert not await reaps_and_sweeps(redis_url, client)
        await admin.execute_command("ACL", "DELUSER", "narrow")
    told = capsys.readouterr()
    assert (told.out + told.err).count("orphaned keys stay") == 1


async def test_no_request_is_blamed_for_a_server_that_was_away(redis_url: str) -> None:
    """With real time: a worker that renews as soon as it can keeps what it holds."""
    async with AsyncQueueClient.from_url(as_role("", redis_url)) as client:
        queue = Unreachable(client, lease_ms=400)
        reaper = Reaper(queue)
        request = NewRequest(new_request_id(), Request.build({"prompt": "a"}))
        (request_id,) = await queue.enqueue([request])
        (claim,) = await queue.take_batch(Room(1, 10**6))
        queue.is_away = True
        await asyncio.sleep(0.6)
        queue.is_away = False
        await reaper.run_once()
        published = await queue.publish([], [Held(request_id, claim.fence)])
        assert published.held == ["ok"]
        for _ in range(3):
            await asyncio.sleep(0.1)
            await queue.publish([], [Held(request_id, claim.fence)])
            await reaper.run_once()
        assert "crashes" not in await queue.run(lookups.record(queue.keys, request_id))
