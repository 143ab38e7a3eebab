"""A client's link stays open and lets nothing pass: nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from promptq import AsyncClient, Client
from promptq.shared.errors import RedisUnavailableError
from promptq.shared.protocol.events import TokenEvent
from tests.producer.playing import HandWorker
from tests.support.network import Network
from tests.support.requests import KINDS, put, read_in
from tests.support.roles import QueueClient, as_role
from tests.support.waiting import until

HOW = ["hold", "lose"]
IMPATIENT = {"silence_seconds": 0.1}
"""How soon a stream without events asks whether it missed any."""


@pytest.fixture
def network(redis_url: str) -> Iterator[Network]:
    """Between clients and the server; its URL is for those who lose patience soon."""
    port = redis.connection.parse_url(redis_url)["port"]
    network = Network(port)
    network.url += "?socket_timeout=0.3"
    yield network
    network.close()


@pytest.fixture
def hand(redis_url: str) -> Iterator[HandWorker]:
    """With a way of its own to the server."""
    with QueueClient.from_url(as_role("", redis_url)) as client:
        yield HandWorker(client)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_when_something_passes_again(
    hand: HandWorker, network: Network, beside: ThreadPoolExecutor, kind: str, how: str
) -> None:
    request_id = put(hand.queue)
    claim = hand.take()
    events: list[TokenEvent] = []
    reading = beside.submit(read_in, kind, network.url, request_id, events.append, **IMPATIENT)
    hand.send(claim, "a")
    until(lambda: events)
    getattr(network, how)()
    hand.send(claim, "b")
    before = network.num_accepted
    until(lambda: network.num_accepted > before or reading.done())  # it gave a connection up
    network.mend()
    hand.send(claim, "c")
    hand.finish(claim, "d")
    assert reading.result() == "abcd"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_gets_no_more_events_ends_with_an_error(
    hand: HandWorker,
    network: Network,
    beside: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    how: str,
) -> None:
    monkeypatch.setattr("promptq.producer.clients.resumable_stream.GIVE_UP_SECONDS", 0.5)
    request_id = put(hand.queue)
    claim = hand.take()
    events: list[TokenEvent] = []
    reading = beside.submit(read_in, kind, network.url, request_id, events.append, **IMPATIENT)
    hand.send(claim, "a")
    until(lambda: events)
    getattr(network, how)()
    with pytest.raises(RedisUnavailableError, match=str(network.port)):
        reading.result()


async def test_streams_of_one_client_hear_again(hand: HandWorker, network: Network) -> None:
    """By their channels: no stream here would ever ask whether it missed any."""
    claims = []
    for _ in range(3):
        put(hand.queue)
        claims.append(hand.take())
    texts = dict.fromkeys((claim.request_id for claim in claims), "")

    async def read(request_id: str) -> None:
        async for event in client.stream(request_id):
            texts[request_id] += event.text

    def has_read(text: str) -> bool:
        return all(it == text for it in texts.values())

    async with AsyncClient(network.url, silence_seconds=3600) as client:
        reading = [asyncio.create_task(read(request_id)) for request_id in texts]
        for claim in claims:
            hand.send(claim, "a")
        await asyncio.to_thread(until, lambda: has_read("a"))
        network.lose()
        for claim in claims:
            hand.send(claim, "b")
        before = network.num_accepted
        await asyncio.to_thread(until, lambda: network.num_accepted > before)
        network.mend()
        await asyncio.to_thread(until, lambda: has_read("ab"))
        for claim in claims:
            hand.finish(claim, "c")
        await asyncio.gather(*reading)
    assert has_read("abc")


@pytest.mark.parametrize("how", HOW)
async def test_enqueueing_into_silence_fails_and_may_be_repeated(
    network: Network, redis_url: str, how: str
) -> None:
    """A held call arrives after all, perhaps later: with a key it is the same request."""
    with (
        Client(network.url) as client,
        redis.Redis.from_url(as_role("", redis_url)) as own,
    ):
        async with AsyncClient(network.url) as asynchronous:
            client.enqueue("a")
            await asynchronous.enqueue("a")
            own.config_resetstat()
            getattr(network, how)()
            with pytest.raises(RedisUnavailableError, match="Timeout"):
                client.enqueue("a", idempotency_key="one")
            with pytest.raises(RedisUnavailableError, match="Timeout"):
                await asynchronous.enqueue("a", idempotency_key="other")
            network.mend()
            one = client.enqueue("a", idempotency_key="one")
            other = await asynchronous.enqueue("a", idempotency_key="other")
            expected = 4 if how == "hold" else 2
            until(lambda: own.info("commandstats")["cmdstat_evalsha"]["calls"] >= expected)
            assert client.stats().waiting == 4
            assert client.enqueue("a", idempotency_key="one") == one
            assert await asynchronous.enqueue("a", idempotency_key="other") == other
