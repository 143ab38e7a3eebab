"""The prefetcher keeps requests prepared: on a real server, with no more of a worker around."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Claims, Held, ModelIdentity, Room
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason, NewRequest, Request, RequestState
from promptq.shared.protocol.rows import Row, RowStatus
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.worker.engine.api.messages import EngineAbilities
from promptq.worker.leases import prefetcher
from promptq.worker.leases.coalescer import Coalescer
from promptq.worker.leases.exchange import Exchange
from promptq.worker.leases.exit_log import ExitLog
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.lease import Lease, LeaseState
from promptq.worker.leases.meter import Meter
from promptq.worker.leases.prefetcher import Prefetcher
from promptq.worker.leases.prepare_or_resume import Preparation
from promptq.worker.leases.publisher import Publisher
from promptq.worker.leases.token_budget import ClaimPolicy
from promptq.worker.text.tokenizer import ByteTokenizer
from tests.support.roles import AsyncQueueClient, as_role
from tests.support.waiting import Clock, async_until
from tests.worker.leases.world import FakeEngine


class CountingQueue(AsyncRequestQueue):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_claimed: list[int] = []
        """By each claim."""

    async def take_batch(self, room: Room) -> Claims:
        claims = await super().take_batch(room)
        self.num_claimed.append(len(claims))
        return claims


class Policy(ClaimPolicy):
    """A policy for how many requests, of a given number of tokens, are to be prepared."""

    free_tokens = 100_000

    def room(self) -> Room:
        held = len(self._leases)
        return Room(self.depth - held, token_budget=self.free_tokens, num_held=held)


class TellingPublisher(Publisher):
    """Notes whom it ends; what stands in `obstacles` comes before."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.refused: dict[str, InvalidRequestError] = {}
        self.completed: list[str] = []
        self.obstacles: list[Exception | asyncio.Event] = []

    async def refuse(self, lease: Lease, error: InvalidRequestError) -> None:
        if self.obstacles:
            obstacle = self.obstacles.pop()
            if isinstance(obstacle, Exception):
                raise obstacle
            await obstacle.wait()
        await super().refuse(lease, error)
        self.refused[lease.request_id] = error

    async def complete(self, lease: Lease) -> None:
        await super().complete(lease)
        self.completed.append(lease.request_id)


class House:
    """An intake and what it stands on, with an engine that has no place until it is asked for."""

    def __init__(
        self,
        client: Any,
        depth: int | None = 4,
        tokenizer: ByteTokenizer | None = None,
        queue: CountingQueue | None = None,
    ) -> None:
        self.queue = queue or CountingQueue(client, worker_id="w")
        self.engine = FakeEngine()
        self.leases = Leases(self.engine)
        self.leases.num_places = 0
        self.policy = Policy(self.leases, self.engine, depth)
        self.meter = meter = Meter()
        exit_log = ExitLog(meter, None, "default", "m", "w")
        self.clock = Clock()
        self.exchange = Exchange(self.queue, self.leases, exit_log, self.clock)
        self.others_report()
        tokenizer = tokenizer or ByteTokenizer()
        self.publisher = TellingPublisher(
            self.queue, self.leases, self.engine, tokenizer, Coalescer(1.0), meter, self.exchange
        )
        self.intake = Prefetcher(
            self.queue,
            self.leases,
            Preparation(tokenizer, self.engine, ModelIdentity(), frozenset({256})),
            self.policy,
            self.publisher,
            self.exchange,
            meter,
        )

    def others_report(self) -> None:
        """Heartbeats, until others have had the time for theirs."""
        for _ in range(12):
            self.clock.now += 1.0
            self.exchange.note_heartbeat()

    @property
    def available(self) -> int:
        return len(self.leases.ready)

    def hand_out(self) -> Lease | None:
        """The next that the engine gets, if one is ready."""
        before = len(self.engine.sequences)
        self.leases.num_places = self.leases.num_running + 1
        self.leases.feed()
        self.leases.num_places = 0
        if len(self.engine.sequences) == before:
            return None
        return self.leases.by_sequence(self.engine.sequences[-1])

    async def until_available(self, count: int) -> None:
        await async_until(lambda: self.available >= count)

    async def put(self, **fields: Any) -> str:
        request = Request.build({"prompt": "a", **fields})
        (request_id,) = await self.queue.enqueue([NewRequest(new_request_id(), request)])
        self.leases.wake_up.work_came()
        return request_id


class PanicError(BaseException):
    """Stands for the panic of a library in Rust, which is no Exception."""


class BlockingTokenizer(ByteTokenizer):
    """Stands at the word `wait` until it is let go, and falls over `boom` and `panic`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def encode_prompt(self, request: Request) -> list[int]:
        if request.prompt == "wait":
            self.reached.set()
            self.go_on.wait()
        if request.prompt == "boom":
            raise RuntimeError("the tokenizer fell over")
        if request.prompt == "panic":
            raise PanicError("the tokenizer fell over")
        return super().encode_prompt(request)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    client = AsyncQueueClient.from_url(as_role("", redis_url))
    yield client
    await client.aclose()


async def test_fills_up_to_its_depth_and_gives_back_on_stop(client: Any) -> None:
    house = House(client, depth=3)
    ids = [await house.put() for _ in range(5)]
    assert not house.intake.is_running
    house.intake.start()
    assert house.intake.is_running
    await house.until_available(3)
    assert await house.queue.count() == 2
    await house.intake.stop()
    assert not house.intake.is_running
    assert house.available == 0
    assert len(house.leases) == 0
    assert [claim.request_id for claim in await house.queue.take_batch(Room(9, 10**6))] == ids


async def test_other_workers_get_their_share_of_a_burst(client: Any) -> None:
    house = House(client, depth=30)
    for _ in range(12):
        await house.put()
    house.intake.num_workers = 3
    house.intake.start()
    await house.until_available(12)
    await house.intake.stop()
    assert house.queue.num_claimed[0] == 4
    assert max(house.queue.num_claimed[1:]) == 1


@pytest.mark.parametrize("num_workers", [1, prefetcher._MANY_WORKERS + 1])
async def test_claims_only_where_it_finds_work_and_needs_no_message(
    client: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(prefetcher, "POLL_SECONDS", 0.02)
    house = House(client, depth=9)
    house.intake.num_workers = num_workers
    looks: list[Any] = []
    run = house.queue.run

    async def counted(call: Any, **options: Any) -> Any:
        looks.append(call)
        return await run(call, **options)

    monkeypatch.setattr(house.queue, "run", counted)
    house.intake.start()

    async def has_looked_in_vain() -> bool:
        before = len(house.queue.num_claimed)
        looks.clear()
        await async_until(lambda: len(looks) >= 3)
        return len(house.queue.num_claimed) == before

    await async_until(has_looked_in_vain)
    keys, payload = house.queue.keys, '{"prompt":"a"}'
    for nth, (key, score) in enumerate(
        [(keys.pending, 1), (keys.delayed, 1), (keys.pending_of("acme"), 1)]
    ):
        await client.hset(keys.request(str(nth)), mapping={"payload": payload, "score": "1"})
        if key == keys.pending_of("acme"):
            await client.sadd(keys.tenants_waiting, "acme")
        await client.zadd(key, {str(nth): score})
        await house.until_available(nth + 1)
    assert sum(house.queue.num_claimed) == 3
    await house.intake.stop()


async def test_runs_once_at_a_time_and_can_be_started_again(client: Any) -> None:
    house = House(client)
    with pytest.raises(RuntimeError, match="not started"):
        _ = house.intake.task
    await house.intake.stop()
    for _ in range(2):
        house.intake.start()
        with pytest.raises(RuntimeError, match="runs already"):
            house.intake.start()
        await house.put()
        await house.until_available(1)
        await house.intake.stop()


async def test_hands_out_in_queue_order_whenever_it_was_prepared(client: Any) -> None:
    house = House(client, depth=9)
    house.intake.start()
    late = await house.put(priority=5)
    await house.until_available(1)
    soon = await house.put(priority=-5)
    await house.until_available(2)
    middle = await house.put(priority=0)
    await house.until_available(3)
    handed_out = [house.hand_out() for _ in range(3)]
    order = [lease.request_id for lease in handed_out if lease is not None]
    assert order == [soon, middle, late]
    assert house.hand_out() is None
    await house.intake.stop()


async def test_measures_how_long_how_full_and_how_often_empty(client: Any) -> None:
    house = House(client, depth=9)
    house.intake.start()
    assert house.hand_out() is None
    for _ in range(3):
        await house.put()
    await house.until_available(3)
    await asyncio.sleep(0.05)
    for _ in range(3):
        assert house.hand_out() is not None
    ready = house.leases.ready
    assert (house.meter.num_claimed, ready.num_handed_out, ready.num_empty) == (3, 3, 1)
    assert ready.waited_seconds >= 3 * 0.05
    assert ready.mean_wait_seconds == ready.waited_seconds / 3
    assert 0 < ready.mean_length <= 3
    await house.intake.stop()


async def test_adapts_its_depth_to_the_rate_of_hand_outs(client: Any) -> None:
    """About 100 ms of work, of the rate over the last two seconds."""
    house = House(client, depth=None)
    assert house.policy.depth == 1
    house.intake.start()
    for n in range(61):
        await house.put()
        await house.until_available(1)
        held = house.hand_out()
        assert held is not None
        house.leases.answered(held, RowStatus.FENCED)
        assert house.policy.depth <= 1 + n // 20
    assert house.policy.depth > 1
    await async_until(lambda: house.policy.depth <= 1)
    await house.intake.stop()


async def test_what_fails_in_preparation_fails_alone_with_its_reason(client: Any) -> None:
    house = House(client, depth=9, tokenizer=BlockingTokenizer())
    bad = await house.put(prompt=[99999], priority=-2)
    boom = await house.put(prompt="boom", priority=-1)
    panic = await house.put(prompt="panic", priority=-1)
    good = await house.put()
    house.intake.start()
    await house.until_available(1)
    await async_until(lambda: len(house.publisher.refused) >= 3)
    reasons = house.publisher.refused
    assert str(reasons[bad]).startswith("prompt: ")
    for fallen in (boom, panic):
        assert reasons[fallen].error_type == "internal_error"
        assert "fell over" in str(reasons[fallen])
    assert house.meter.num_refused == 3
    held = house.hand_out()
    assert held is not None
    assert held.request_id == good
    await house.intake.stop()


async def test_an_end_that_cannot_be_sent_is_sent_later_and_delays_nobody(client: Any) -> None:
    house = House(client, depth=9)
    house.publisher.obstacles.append(RedisConnectionError("gone for a moment"))
    bad = await house.put(prompt=[99999], priority=-1)
    await house.put()
    giving_back = asyncio.create_task(house.exchange.run_returns())
    house.intake.start()
    await house.until_available(1)
    await async_until(lambda: house.publisher.refused)
    assert [*house.publisher.refused] == [bad]
    giving_back.cancel()
    await house.intake.stop()
    assert await house.queue.state(bad) is RequestState.FAILED
    assert await house.queue.count() == 1


async def test_stopping_does_not_wait_for_a_tokenizer_and_loses_nothing(client: Any) -> None:
    tokenizer = BlockingTokenizer()
    house = House(client, tokenizer=tokenizer)
    for _ in range(3):
        await house.put(prompt="wait")
    house.intake.start()
    await async_until(tokenizer.reached.is_set)
    await house.intake.stop()
    tokenizer.go_on.set()
    assert await house.queue.count() == 3
    assert await client.zcard(house.queue.keys.leases) == 0


async def test_stopping_while_an_end_is_sent_loses_nothing(client: Any) -> None:
    house = House(client, depth=9)
    house.publisher.obstacles.append(asyncio.Event())
    for n in range(4):
        await house.put(prompt=[99999 if n == 0 else 1])
    house.intake.start()
    await async_until(lambda: not house.publisher.obstacles)
    await house.intake.stop()
    assert await house.queue.count() == 4
    assert await client.zcard(house.queue.keys.leases) == 0


async def test_stopping_while_it_claims_loses_nothing(client: Any) -> None:
    for _ in range(20):
        house = House(client, depth=9)
        await client.flushall()
        for _ in range(3):
            await house.put()
        house.intake.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await house.intake.stop()
        assert await house.queue.count() == 3


class LosingQueue(CountingQueue):
    """Loses the replies to claims."""

    async def run(self, call: Any) -> Any:
        reply = await super().run(call)
        wants = dict(zip(call.args[1::2], call.args[2::2], strict=False))
        if call.script == "claim" and wants["max_count"] > 0:
            raise RedisConnectionError("the reply was lost")
        return reply


async def test_stopping_gives_back_requests_whose_reply_was_lost(client: Any) -> None:
    house = House(client, queue=LosingQueue(client, worker_id="w"))
    request_id = await house.put()
    house.intake.start()
    while await house.queue.count() == 1:
        await asyncio.sleep(0.002)
    await house.intake.stop()
    record = await house.queue.run(lookups.record(house.queue.keys, request_id))
    assert (record["state"], record.get("crashes")) == ("waiting", None)


class RefusingQueue(CountingQueue):
    """Takes nothing back for a while."""

    takes_back = False

    async def release(self, held: Sequence[Held], **how: Any) -> list[str]:
        if not self.takes_back:
            raise RedisConnectionError("gone for a moment")
        return await super().release(held, **how)


async def test_what_the_server_does_not_take_back_stays_held(client: Any) -> None:
    """Its lease is renewed like any other, and the next try gives it back, its length included."""
    queue = RefusingQueue(client, worker_id="w")
    house = House(client, depth=9, queue=queue)
    ids = [await house.put(prompt="four") for _ in range(3)]
    house.intake.start()
    await house.until_available(3)
    with pytest.raises(RedisConnectionError):
        await house.intake.stop()
    assert [lease.request_id for lease in house.leases] == ids
    assert {lease.state for lease in house.leases} == {LeaseState.RETURNING}
    queue.takes_back = True
    await house.intake.stop()
    assert (len(house.leases), house.available) == (0, 0)
    assert await queue.count() == 3
    records = [await queue.run(lookups.record(queue.keys, request_id)) for request_id in ids]
    assert [record["prompt_tokens"] for record in records] == ["4"] * 3


async def test_what_ended_meanwhile_is_not_handed_out(client: Any) -> None:
    house = House(client, depth=9)
    first, second = await house.put(), await house.put()
    house.intake.start()
    await house.until_available(2)
    held = house.leases.by_request(first)
    assert held is not None
    house.leases.answered(held, RowStatus.FENCED)
    assert house.available == 1
    left = house.hand_out()
    assert left is not None
    assert left.request_id == second
    await house.intake.stop()


async def test_what_has_nothing_left_to_generate_is_only_ended(client: Any) -> None:
    house = House(client)
    request_id = await house.put(max_tokens=1)
    (claim,) = await house.queue.take_batch(Room(1, 10**6))
    event = TokenEvent(index=0, token_ids=[97], text="a", attempt=1)
    await house.queue.publish([Row.of(request_id, claim.fence, event)])
    await house.queue.release([Held(request_id, claim.fence)])
    house.intake.start()
    await async_until(lambda: house.publisher.completed)
    assert house.publisher.completed == [request_id]
    assert house.available == 0
    await house.intake.stop()


async def test_what_has_output_is_never_ended_for_a_field_that_no_server_serves_now(
    client: Any,
) -> None:
    house = House(client)
    house.engine.abilities = EngineAbilities(unheeded=frozenset({"min_p"}))
    begun = await house.put(min_p=0.5)
    (claim,) = await house.queue.take_batch(Room(1, 10**6))
    event = TokenEvent(index=0, token_ids=[97], text="a", attempt=1)
    await house.queue.publish([Row.of(begun, claim.fence, event)])
    await house.queue.release([Held(begun, claim.fence)])
    new = await house.put(min_p=0.5)
    giving_back = asyncio.create_task(house.exchange.run_returns())
    house.intake.start()
    await async_until(lambda: house.publisher.refused)
    await async_until(lambda: client.zscore(house.queue.keys.delayed, begun))
    assert [*house.publisher.refused] == [new]
    assert await house.queue.state(begun) is RequestState.WAITING
    giving_back.cancel()
    await house.intake.stop()


async def test_nothing_is_refused_for_others_before_they_could_report_after_an_outage(
    client: Any,
) -> None:
    house = House(client)
    house.engine.abilities = EngineAbilities(unheeded=frozenset({"min_p"}))
    house.clock.now += 20.0
    giving_back = asyncio.create_task(house.exchange.run_returns())
    house.intake.start()
    for beats in (False, True):
        request_id = await house.put(min_p=0.5)
        await async_until(lambda: client.zscore(house.queue.keys.delayed, request_id))  # noqa: B023
        if not beats:
            house.exchange.note_heartbeat()
    assert not house.publisher.refused
    house.others_report()
    await async_until(lambda: len(house.publisher.refused) == 2)
    giving_back.cancel()
    await house.intake.stop()


async def test_reports_the_exact_length_of_a_prompt(client: Any) -> None:
    house = House(client)
    request_id = await house.put(prompt="four")
    house.intake.start()
    key = house.queue.keys.request(request_id)
    while await client.hget(key, "prompt_tokens") is None:
        await asyncio.sleep(0.002)
    assert await client.hget(key, "prompt_tokens") == b"4"
    (lease,) = house.leases
    assert lease.as_held().prompt_tokens is None, "it is told once"
    await house.intake.stop()


async def test_asks_again_for_what_did_not_fit_only_with_more_room_or_news(client: Any) -> None:
    house = House(client)
    house.policy.free_tokens = 10
    await house.put(max_tokens=100)
    house.intake.start()
    await async_until(lambda: house.queue.num_claimed)
    before = len(house.queue.num_claimed)
    for _ in range(200):
        house.leases.wake_up.room_freed()
        await asyncio.sleep(0.0005)
    assert len(house.queue.num_claimed) - before <= 3, "a poll each second, and what was on its way"
    house.policy.free_tokens = 1000
    house.leases.wake_up.room_freed()
    await house.until_available(1)
    await house.intake.stop()


async def test_room_that_is_freed_during_a_claim_is_claimed_without_a_poll(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowQueue(CountingQueue):
        async def run(self, call: Any) -> Any:
            reply = await super().run(call)
            if call.script == "claim" and house.policy.free_tokens == 10:
                house.policy.free_tokens = 1000
                house.leases.wake_up.room_freed()
            return reply

    monkeypatch.setattr(prefetcher, "POLL_SECONDS", 1000.0)
    house = House(client, queue=SlowQueue(client, worker_id="w"))
    house.policy.free_tokens = 10
    await house.put(max_tokens=100)
    house.intake.start()
    await house.until_available(1)
    assert house.queue.num_claimed[:2] == [0, 1]
    await house.intake.stop()


async def test_work_that_came_while_there_was_no_room_is_claimed_without_a_poll(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "POLL_SECONDS", 1000.0)
    house = House(client, depth=1)
    await house.put()
    house.intake.start()
    await house.until_available(1)
    await house.put()
    await async_until(lambda: not house.leases.wake_up._work_came)
    assert house.available == 1, "the last claim left nothing in the queue, and there is no room"
    house.policy._fixed_depth = 2
    house.leases.wake_up.room_freed()
    await house.until_available(2)
    await house.intake.stop()


async def test_a_lost_connection_is_not_its_end(redis_url: str, client: Any) -> None:
    house = House(client)
    house.intake.start()
    await house.put()
    await house.until_available(1)
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as other:
        await other.client_kill_filter(_type="normal", skipme=True)
        own, house.queue = house.queue, CountingQueue(other)
        await house.put()
        house.queue = own
    await house.until_available(2)
    assert house.intake.is_running
    await house.intake.stop()


async def test_an_answer_in_the_log_counts_for_the_next_attempt(client: Any) -> None:
    house = House(client)
    request_id = await house.put(max_tokens=5)
    (claim,) = await house.queue.take_batch(Room(1, 10**6))
    events = [TokenEvent(index=n, token_ids=[97 + n], text=chr(97 + n)) for n in range(2)]
    await house.queue.publish([Row.of(request_id, claim.fence, event) for event in events])
    await house.queue.release([Held(request_id, claim.fence)])
    house.intake.start()
    await house.until_available(1)
    held = house.hand_out()
    assert held is not None
    assert held.prepared.engine_request.output_token_ids == [97, 98]
    last = held.prepared.next_row([99], "c", finish_reason=FinishReason.STOP)
    assert last.start == 2
    assert '"text":"abc"' in last.result_json
    await house.intake.stop()
