"""Each RETURNING lease is given back once, in its way, and again if that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from promptq.shared.protocol.claims import Held
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.leases.exchange import Exchange
from promptq.worker.leases.exit_log import ExitLog
from promptq.worker.leases.lease import LeaseState
from promptq.worker.leases.meter import Meter
from tests.support.waiting import async_until
from tests.worker.leases.world import World


class Server:
    """Takes back what it is given, once it may, and notes it."""

    worker_id = "w"

    def __init__(self) -> None:
        self.taken: list[tuple[list[str], bool, list[int]]] = []
        self.may_answer = asyncio.Event()
        self.failures = 0

    async def release(
        self, held: Sequence[Held], *, crashed: bool, delays_ms: Sequence[int]
    ) -> list[str]:
        await self.may_answer.wait()
        if self.failures:
            self.failures -= 1
            raise RedisConnectionError("gone for a moment")
        self.taken.append(([it.request_id for it in held], crashed, [*delays_ms]))
        return ["waiting"] * len(held)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def exchange(server: Server, world: World) -> Exchange:
    exit_log = ExitLog(Meter(), None, "default", "m", "w")
    return Exchange(cast(AsyncRequestQueue, server), world.leases, exit_log)


async def test_each_goes_back_in_its_own_way(
    server: Server, world: World, exchange: Exchange
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"crashed": True},
        "c": {"delay_ms": 100},
        "d": {"delay_ms": 0},
    }
    for name, how in ways.items():
        world.leases.returning(world.claimed(name), **how)
    server.may_answer.set()
    await exchange.give_back()
    assert server.taken == [(["b"], True, []), (["a"], False, []), (["c", "d"], False, [100, 0])]
    assert (len(world.leases), world.leases.some_return.is_set()) == (0, False)


async def test_none_is_given_back_twice_by_calls_at_the_same_time(
    server: Server, world: World, exchange: Exchange
) -> None:
    world.leases.returning(world.claimed("a"))
    running = asyncio.create_task(exchange.run_returns())
    stopping = asyncio.create_task(exchange.give_back())
    for _ in range(10):
        await asyncio.sleep(0)
    world.leases.returning(world.claimed("b"))
    server.may_answer.set()
    await stopping
    while len(world.leases):
        await asyncio.sleep(0)
    assert [names for names, _, _ in server.taken] == [["a"], ["b"]]
    running.cancel()


async def test_what_is_not_taken_stays_held_and_is_given_back_again(
    server: Server, world: World, exchange: Exchange
) -> None:
    lease = world.claimed("a")
    world.leases.returning(lease, crashed=True)
    server.may_answer.set()
    server.failures = 2
    with pytest.raises(RedisConnectionError):
        await exchange.give_back()
    assert (lease.state, list(world.leases)) == (LeaseState.RETURNING, [lease])
    running = asyncio.create_task(exchange.run_returns())
    await async_until(lambda: not len(world.leases))
    assert server.taken == [(["a"], True, [])]
    running.cancel()
