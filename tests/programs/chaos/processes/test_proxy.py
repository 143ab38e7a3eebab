"""The proxy spoils the way as it says, and only for whom it says."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.programs.chaos.processes.proxy import Proxy, Role

RNG = random.Random(1)


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(urlsplit(redis_url).port or 0)
    await proxy.start()
    yield proxy
    await proxy.stop()


def connect(proxy: Proxy, role: Role) -> redis.asyncio.Redis:
    """A client that never tries again."""
    return redis.asyncio.Redis.from_url(proxy.url(role), retry=Retry(NoBackoff(), 0))


async def test_passes_commands_and_replies(proxy: Proxy) -> None:
    async with connect(proxy, Role.WORKERS) as client:
        await client.set("a", "x" * 200_000)
        assert len(await client.get("a")) == 200_000


async def test_cuts_connections_of_one_role(proxy: Proxy) -> None:
    async with connect(proxy, Role.WORKERS) as cut, connect(proxy, Role.PRODUCERS) as spared:
        await cut.ping()
        await spared.ping()
        assert proxy.cut(Role.WORKERS, 1.0, RNG) == 1
        assert await spared.ping()
        with pytest.raises(RedisConnectionError):
            await cut.ping()
        assert await cut.ping()  # a new connection


async def test_a_command_whose_reply_is_swallowed_is_carried_out_once(proxy: Proxy) -> None:
    async with connect(proxy, Role.WORKERS) as client:
        await client.ping()
        proxy.swallow(Role.WORKERS, 1.0, RNG)
        with pytest.raises(RedisConnectionError):
            await client.incr("counter")
        assert await client.get("counter") == b"1"
        assert proxy.num_swallowed == 1


async def test_a_stalled_link_lets_nothing_pass_until_it_is_over(proxy: Proxy) -> None:
    async with connect(proxy, Role.WORKERS) as client:
        await client.ping()
        stalling = asyncio.create_task(proxy.stall(Role.WORKERS, 0.3))
        await asyncio.sleep(0)
        started = time.monotonic()
        assert await client.ping()
        assert time.monotonic() - started >= 0.2
        await stalling


async def test_a_slow_link_delays_both_ways(proxy: Proxy) -> None:
    async with connect(proxy, Role.SUBSCRIBERS) as client:
        await client.ping()
        slowing = asyncio.create_task(proxy.slow(Role.SUBSCRIBERS, 0.1, 0.5))
        await asyncio.sleep(0)
        started = time.monotonic()
        assert await client.ping()
        assert time.monotonic() - started >= 0.2
        await slowing
        assert await client.ping()


async def test_a_server_that_is_down_is_found_down() -> None:
    proxy = Proxy(1)  # nobody listens there
    await proxy.start()
    async with connect(proxy, Role.WORKERS) as client:
        with pytest.raises(RedisConnectionError):
            await client.ping()
    await proxy.stop()
