"""However many pages are open, what they show is read once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from promptq.producer.gateway.dashboard.poller import Poller, Topic
from promptq.shared.errors import RedisUnavailableError
from tests.support.waiting import async_until


class Source:
    def __init__(self) -> None:
        self.reads: list[str] = []
        self.error: Exception | None = None

    async def read(self, topic: Topic) -> str:
        self.reads.append(topic[0])
        if self.error is not None:
            raise self.error
        return f"{topic[0]} {len(self.reads)}"


async def test_many_pages_share_each_reading() -> None:
    source = Source()
    poller = Poller(source.read, interval=0.01)
    pages = [poller.watch(("overview",)) for _ in range(50)]
    assert {await anext(page) for page in pages} == {"overview 1"}
    second = [await anext(page) for page in pages]
    assert len(source.reads) < 10
    assert all(it is not None and it > "overview 1" for it in second)
    for page in pages:
        await page.aclose()


async def test_nothing_is_read_while_nobody_watches() -> None:
    source = Source()
    poller = Poller(source.read, interval=0.005)
    async with aclosing(poller.watch(("a",))) as one, aclosing(poller.watch(("b",))) as other:
        await anext(one)
        await anext(other)
        await anext(one)
    num = len(source.reads)
    await asyncio.sleep(0.05)
    assert len(source.reads) == num
    async with aclosing(poller.watch(("a",))) as again:
        await anext(again)
        await anext(again)
    assert set(source.reads[num:]) == {"a"}, "the topic that nobody watches is forgotten"


async def test_whoever_is_slow_gets_the_newest_only() -> None:
    source = Source()
    poller = Poller(source.read, interval=0.005)
    async with aclosing(poller.watch(("a",))) as page:
        await anext(page)
        await async_until(lambda: len(source.reads) >= 10)
        latest = await anext(page)
        assert latest is not None
        assert int(latest.split()[1]) >= 10


@pytest.mark.parametrize("error", [RedisUnavailableError("gone"), ValueError("a stranger's")])
async def test_what_cannot_be_read_is_said_to_be_so_until_it_can(error: Exception) -> None:
    source = Source()
    poller = Poller(source.read, interval=0.005)
    async with aclosing(poller.watch(("a",))) as page:
        await anext(page)
        source.error = error
        while await anext(page) is not None:
            pass
        source.error = None
        while (latest := await anext(page)) is None:
            pass
        assert int(latest.split()[1]) > 1, "read again, not what was there before"
