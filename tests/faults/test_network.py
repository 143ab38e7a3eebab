"""The network breaks as it says, and only for those that go by it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.network import Network

RNG = random.Random(1)


@pytest.fixture
def network(redis_url: str) -> Iterator[Network]:
    with closing(Network(urlsplit(redis_url).port or 0)) as network:
        yield network


@pytest.fixture
def other(redis_url: str) -> Iterator[Network]:
    with closing(Network(urlsplit(redis_url).port or 0)) as network:
        yield network


def connect(network: Network) -> redis.asyncio.Redis:
    """A client that never tries again."""
    return redis.asyncio.Redis.from_url(network.address, retry=Retry(NoBackoff(), 0))


async def test_passes_commands_and_replies(network: Network) -> None:
    async with connect(network) as client:
        await client.set("a", "x" * 200_000)
        assert len(await client.get("a")) == 200_000


async def test_cuts_its_own_connections(network: Network, other: Network) -> None:
    async with connect(network) as cut, connect(other) as spared:
        await cut.ping()
        await spared.ping()
        assert network.cut_some(1.0, RNG) == 1
        assert await spared.ping()
        with pytest.raises(RedisConnectionError):
            await cut.ping()
        assert await cut.ping()  # a new connection
        network.cut()
        for _ in range(2):
            with pytest.raises(RedisConnectionError):
                await cut.ping()
        network.mend()
        assert await cut.ping()


async def test_a_command_whose_reply_is_swallowed_is_carried_out_once(network: Network) -> None:
    async with connect(network) as client:
        await client.ping()
        network.swallow_some(1.0, RNG)
        with pytest.raises(RedisConnectionError):
            await client.incr("counter")
        network.swallow_reply_to(lambda sent: b"INCR" in sent)
        assert await client.get("counter") == b"1"
        with pytest.raises(RedisConnectionError):
            await client.incr("counter")
        assert await client.get("counter") == b"2"
        assert network.num_swallowed == 2


async def test_a_held_link_lets_nothing_pass_until_it_is_over(network: Network) -> None:
    async with connect(network) as client:
        await client.ping()
        network.hold()
        asking = asyncio.ensure_future(client.ping())
        assert await asyncio.wait({asking}, timeout=0.2) == (set(), {asking})
        network.let_flow()
        assert await asking


async def test_a_slow_link_delays_both_ways(network: Network) -> None:
    async with connect(network) as client:
        await client.ping()
        network.slow(0.1)
        started = time.monotonic()
        assert await client.ping()
        assert time.monotonic() - started >= 0.2
        network.slow(0.0)
        assert await client.ping()


async def test_a_server_that_is_down_is_found_down() -> None:
    with closing(Network(1)) as network:  # nobody listens there
        async with connect(network) as client:
            with pytest.raises(RedisConnectionError):
                await client.ping()
