"""All streams of an asyncio client hear through one connection, and none of them notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio

from promptq import AsyncClient
from promptq.producer.clients.resumable_stream import Notice
from promptq.producer.clients.subscriptions import MAX_UNREAD, Mailbox, Subscriptions
from promptq.shared.errors import (
    QueueClosedError,
    RedisAuthError,
    RedisUnavailableError,
    StreamChangedError,
)
from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import RequestState
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.playing import KEYS, HandWorker
from tests.support.waiting import async_until

NUM_STREAMS = 64
_NO_SILENCE = 3600.0  # so nothing but the rule under test brings the events


class Readers:
    """Streams of one client, each read by a task or handed out to a function."""

    def __init__(self, client: AsyncClient, way: str) -> None:
        self._client = client
        self._way = way
        self.events: list[list[TokenEvent]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def read(self, request_id: str) -> None:
        self.events.append([])
        reading = self._read(request_id, self.events[-1].append)
        self.tasks.append(asyncio.create_task(reading))

    @property
    def texts(self) -> list[str]:
        return ["".join(event.text for event in events) for events in self.events]

    async def _read(self, request_id: str, add: Callable[[TokenEvent], None]) -> None:
        if self._way == "follow":
            await self._client.follow(request_id, add)
            return
        async with aclosing(self._client.stream(request_id)) as stream:
            async for event in stream:
                add(event)


def subscriber_ids(worker: HandWorker) -> list[str]:
    return [each["id"] for each in worker.redis.client_list(_type="pubsub")]


def num_subscribers(worker: HandWorker) -> int:
    return len(subscriber_ids(worker))


def num_following(worker: HandWorker, request_id: str, sharded: bool = False) -> int:
    count = worker.redis.pubsub_shardnumsub if sharded else worker.redis.pubsub_numsub
    [(_, num)] = count(KEYS.events(request_id))
    return int(num)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client that leaves neither a task nor a subscriber behind."""
    before = other_tasks()
    async with AsyncClient(url, silence_seconds=_NO_SILENCE, **options) as client:
        yield client
    assert other_tasks() == before


def other_tasks() -> set[asyncio.Task[Any]]:
    """Returns the tasks other than the current one: a fixture begins in one task and ends in
    another.
    """
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with connected(redis_url) as client:
        yield client


@pytest.fixture(params=["stream", "follow"])
def way(request: pytest.FixtureRequest) -> str:
    """The methods that read a stream."""
    return str(request.param)


@pytest.fixture
def readers(client: AsyncClient, way: str) -> Readers:
    """The streams of `client`."""
    return Readers(client, way)


async def enqueue(client: AsyncClient, worker: HandWorker, num: int) -> list[Claim]:
    await client.enqueue_many([{"prompt": "Hi"}] * num)
    return [worker.take() for _ in range(num)]


@pytest.mark.parametrize("sharded", [False, True])
async def test_many_streams_and_one_connection(
    client: AsyncClient, readers: Readers, own_worker: HandWorker, sharded: bool
) -> None:
    """The server has one subscriber for all of them, and none when the last stream ended."""
    if sharded:
        own_worker.redis.hset(KEYS.config, "pubsub", "sharded")
    before = asyncio.all_tasks()
    claims = await enqueue(client, own_worker, NUM_STREAMS)
    for claim in claims:
        readers.read(claim.request_id)
    for claim in claims:
        await async_until(lambda claim=claim: num_following(own_worker, claim.request_id, sharded))
    assert num_subscribers(own_worker) == 1
    for claim in claims:
        own_worker.send(claim, claim.request_id)
    await async_until(lambda: all(readers.texts))
    for claim in claims:
        own_worker.finish(claim, "!")
    await asyncio.gather(*readers.tasks)
    assert readers.texts == [f"{claim.request_id}!" for claim in claims]
    await async_until(lambda: num_subscribers(own_worker) == 0)
    assert asyncio.all_tasks() == before


async def test_two_streams_of_one_request(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """Each gets all of it, also who joins late, and one's leaving is not the other's."""
    [claim] = await enqueue(client, own_worker, 1)
    readers.read(claim.request_id)
    readers.read(claim.request_id)
    own_worker.send(claim, "a")
    await async_until(lambda: readers.texts == ["a", "a"])
    readers.read(claim.request_id)
    await async_until(lambda: readers.texts == ["a", "a", "a"])
    readers.tasks[0].cancel()
    await asyncio.wait(readers.tasks[:1])
    assert num_following(own_worker, claim.request_id) == 1
    own_worker.send(claim, "b")
    await async_until(lambda: readers.texts == ["a", "ab", "ab"])
    own_worker.finish(claim)
    await asyncio.gather(*readers.tasks[1:])


async def test_a_lost_connection_of_many_streams(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """Cut off in mid-stream, again and again: nothing lost, nothing twice, one connection."""
    texts = "abcdef"
    claims = await enqueue(client, own_worker, NUM_STREAMS)
    for claim in claims:
        readers.read(claim.request_id)
    for n, text in enumerate(texts, start=1):
        for claim in claims[: NUM_STREAMS // 2]:
            own_worker.send(claim, text)
        own_worker.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        for claim in claims[NUM_STREAMS // 2 :]:
            own_worker.send(claim, text)
        await async_until(lambda n=n: readers.texts == [texts[:n]] * NUM_STREAMS)
        assert num_subscribers(own_worker) <= 1
    for claim in claims:
        own_worker.finish(claim)
    await asyncio.gather(*readers.tasks)
    for events in readers.events:
        assert [event.index for event in events] == [*range(len(texts)), len(texts)]


async def test_tokens_that_were_lost_and_replaced_unheard(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """This can happen after a failover in bf16. At the latest at its end, a stream reports that it
    read other tokens.
    """
    [claim] = await enqueue(client, own_worker, 1)
    readers.read(claim.request_id)
    own_worker.send(claim, "abc")
    await async_until(lambda: readers.texts == ["abc"])
    own_worker.redis.delete(KEYS.tokens(claim.request_id))
    own_worker.adopt(claim)
    own_worker.log_only(claim, "axc")
    own_worker.redis.client_kill_filter(_type="pubsub")
    await async_until(lambda: num_following(own_worker, claim.request_id) == 1)
    own_worker.finish(claim, "d")
    with pytest.raises(StreamChangedError, match="from token 1 on"):
        await readers.tasks[0]
    assert (await client.result(claim.request_id)).text == "axcd"


async def test_one_reconnection_for_all(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """The channels are subscribed again at once; the streams do not each begin anew."""

    def num_begun() -> int:
        """Each beginning stream asks for the queue's kind of pub/sub."""
        return int(own_worker.redis.info("commandstats")["cmdstat_hget"]["calls"])

    claims = await enqueue(client, own_worker, 5)
    for claim in claims:
        readers.read(claim.request_id)
        await async_until(lambda claim=claim: num_following(own_worker, claim.request_id) == 1)
    begun = num_begun()
    [lost] = subscriber_ids(own_worker)
    own_worker.redis.execute_command("CLIENT", "KILL", "ID", lost)
    await async_until(lambda: lost not in subscriber_ids(own_worker))
    for claim in claims:
        await async_until(lambda claim=claim: num_following(own_worker, claim.request_id) == 1)
    assert num_subscribers(own_worker) == 1
    assert num_begun() == begun
    for claim in claims:
        own_worker.finish(claim, "a")
    await asyncio.gather(*readers.tasks)


async def test_more_streams_than_connections(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """They all begin at once, and leave connections for the other calls of the client."""
    claims = await enqueue(client, own_worker, 150)
    before = len(own_worker.redis.client_list(_type="normal"))  # other tests may have left some
    for claim in claims:
        readers.read(claim.request_id)
    for claim in claims:
        await async_until(lambda claim=claim: num_following(own_worker, claim.request_id) == 1)
    assert len(own_worker.redis.client_list(_type="normal")) < before + 50
    for claim in claims:
        own_worker.finish(claim, "a")
    await asyncio.gather(*readers.tasks)
    assert readers.texts == ["a"] * len(claims)


async def test_leaving_early_unsubscribes(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """The channel has no subscriber any more; those who stay hear on, and may come back."""
    leaving, staying = await enqueue(client, own_worker, 2)
    readers.read(staying.request_id)
    own_worker.send(leaving, "a")
    for _ in range(3):
        async with aclosing(client.stream(leaving.request_id)) as stream:
            async for event in stream:
                assert event.text == "a"
                break
            await async_until(lambda: num_following(own_worker, leaving.request_id) == 1)
        await async_until(lambda: num_following(own_worker, leaving.request_id) == 0)
        assert num_following(own_worker, staying.request_id) == 1
    own_worker.finish(staying, "b")
    await asyncio.gather(*readers.tasks)
    assert readers.texts == ["b"]
    own_worker.finish(leaving, "c")
    assert (await client.result(leaving.request_id)).text == "ac"


async def test_a_cancelled_reader_leaves_alone(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """A task that is cancelled in its wait takes no one with it, and its channel is left."""
    gone, other = await enqueue(client, own_worker, 2)
    for claim in (gone, other):
        readers.read(claim.request_id)
        await async_until(lambda claim=claim: num_following(own_worker, claim.request_id) == 1)
    # An earlier test's may still be closing.
    await async_until(lambda: num_subscribers(own_worker) == 1)
    readers.tasks[0].cancel()
    await async_until(lambda: num_following(own_worker, gone.request_id) == 0)
    [connection] = own_worker.redis.client_list(_type="pubsub")
    own_worker.finish(other, "a")
    await asyncio.gather(*readers.tasks[1:])
    assert readers.texts[1] == "a"
    assert connection["sub"] in ("1", 1)


@pytest.mark.parametrize("num_turns", [*range(6), 10**9])
async def test_a_reader_that_is_cancelled_again_and_again(
    redis_url: str, own_worker: HandWorker, num_turns: int
) -> None:
    """Nothing goes on with the connection it has left, whoever uses that by then."""
    async with connected(f"{redis_url}?socket_timeout=0.5") as client:
        [claim] = await enqueue(client, own_worker, 1)
        request_id, before = claim.request_id, other_tasks()
        reading = asyncio.create_task(client.result(request_id))
        await async_until(lambda: num_following(own_worker, request_id) == 1)
        while reading.cancel() and num_turns > 0:  # until it has ended, as anyio does
            await asyncio.sleep(0)
            num_turns -= 1
        await asyncio.gather(reading, return_exceptions=True)
        assert other_tasks() == before
        for _ in range(70):  # longer than a reader waits before it tests a silent connection
            assert await client.state(request_id) is RequestState.ACTIVE
            await asyncio.sleep(0.01)


async def test_the_last_reader_leaves_as_the_connection_is_lost(
    redis_url: str, own_worker: HandWorker
) -> None:
    """However far the keeper has come with a new one."""
    async with connected(redis_url) as client:
        [claim] = await enqueue(client, own_worker, 1)
        before = other_tasks()
        for num_turns in range(24):
            reading = asyncio.create_task(client.result(claim.request_id))
            await async_until(lambda: num_following(own_worker, claim.request_id) == 1)
            own_worker.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            for _ in range(num_turns):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert other_tasks() == before


async def test_a_slow_reader(client: AsyncClient, readers: Readers, own_worker: HandWorker) -> None:
    """A slow reader delays nobody, and gets all events when it goes on."""
    num = MAX_UNREAD + 10
    slow, quick = await enqueue(client, own_worker, 2)
    readers.read(quick.request_id)
    async with aclosing(client.stream(slow.request_id)) as stream:
        own_worker.send(slow, "a")
        events = [await anext(stream)]
        for _ in range(num):
            own_worker.send(slow, "a")
            own_worker.send(quick, "b")
        own_worker.finish(slow)
        own_worker.finish(quick)
        await asyncio.gather(*readers.tasks)
        events += [event async for event in stream]
    assert readers.texts == ["b" * num]
    assert [event.index for event in events] == [*range(num + 1), num + 1]
    assert events[-1].is_last


async def test_what_a_handler_gives_is_awaited(client: AsyncClient, own_worker: HandWorker) -> None:
    """The handler is not called until then, and messages that come meanwhile are not lost."""
    num = 2 * MAX_UNREAD
    [claim] = await enqueue(client, own_worker, 1)
    ready, indices = asyncio.Event(), list[int]()

    async def be_ready() -> None:
        await ready.wait()

    def handle(event: TokenEvent) -> Callable[[], Awaitable[None]] | None:
        indices.append(event.index)
        return be_ready if event.index == 1 else None

    following = asyncio.create_task(client.follow(claim.request_id, handle))
    for _ in range(num):
        own_worker.send(claim, "a")
        await asyncio.sleep(0)
    own_worker.finish(claim)
    await async_until(lambda: 1 in indices)
    await asyncio.sleep(0.05)
    assert indices == [0, 1]
    ready.set()
    await following
    assert indices == [*range(num + 1)]


async def test_following_from_within(client: AsyncClient, own_worker: HandWorker) -> None:
    [claim] = await enqueue(client, own_worker, 1)
    for letter in "abc":
        own_worker.send(claim, letter)
    own_worker.finish(claim, "d")
    texts: list[str] = []
    await client.follow(claim.request_id, lambda event: texts.append(event.text), from_index=2)
    assert texts == ["c", "d"]


@pytest.mark.parametrize(
    ("does", "ends_with"),
    [
        ("fails", ValueError),
        ("stops", RuntimeError),  # Python makes that of a StopIteration in a coroutine
        ("is cancelled", asyncio.CancelledError),
        ("cancels", asyncio.CancelledError),
    ],
)
async def test_a_handler_that_fails(
    client: AsyncClient,
    readers: Readers,
    own_worker: HandWorker,
    does: str,
    ends_with: type[BaseException],
) -> None:
    """Its stream ends at once, and those beside it go on."""
    bad, good = await enqueue(client, own_worker, 2)
    readers.read(good.request_id)
    num_heard = 0

    def fail(event: TokenEvent) -> None:
        nonlocal num_heard
        num_heard += 1
        if event.text != "!":
            return
        if does == "cancels":
            following.cancel()
        else:
            errors = {"fails": ValueError, "stops": StopIteration}
            raise errors.get(does, asyncio.CancelledError)

    following = asyncio.create_task(client.follow(bad.request_id, fail))
    for claim in (bad, good):
        own_worker.send(claim, "a")
    await async_until(lambda: num_heard == 1 and readers.texts == ["a"])
    # The next comes by the channel.
    own_worker.send(bad, "!")
    own_worker.send(good, "b")
    with pytest.raises(ends_with):
        await following
    await async_until(lambda: num_following(own_worker, bad.request_id) == 0)
    own_worker.finish(good, "c")
    await asyncio.gather(*readers.tasks)
    assert readers.texts == ["abc"]


async def test_a_mailbox_is_bounded() -> None:
    """A dropped event is reported, and later events are kept."""
    mailbox = Mailbox(Subscriptions(None))
    for n in range(10 * MAX_UNREAD):
        mailbox.put(b"%d" % n)
    unread = []
    while (item := await mailbox.listen(0.001, lambda item: item)) is not None:
        unread.append(item)
    assert len(unread) <= MAX_UNREAD
    assert unread[0] is Notice.MISSED
    assert unread[-1] == b"%d" % (10 * MAX_UNREAD - 1)


async def test_who_joins_before_the_reply_hears_of_the_reply_too(redis_url: str) -> None:
    """Messages that the server sent before its reply may be missing, so the log is read again."""
    async with redis.asyncio.Redis.from_url(redis_url) as own:
        subscriptions = Subscriptions(own)
        channel = KEYS.events("r")
        first, second = Mailbox(subscriptions), Mailbox(subscriptions)
        await first.subscribe(channel, sharded=False)
        while not subscriptions._requested:
            await asyncio.sleep(0)
        await second.subscribe(channel, sharded=False)
        heard = [await second.listen(_NO_SILENCE, lambda item: item) for _ in range(2)]
        assert heard == [Notice.SUBSCRIBED] * 2
        assert await own.publish(channel, "a") == 1
        assert await second.listen(_NO_SILENCE, lambda item: item) == b"a"
        await subscriptions.aclose()


async def test_closing_ends_all_streams(
    client: AsyncClient, readers: Readers, own_worker: HandWorker
) -> None:
    """They say so at once, without waiting for a silence, and no connection stays."""
    claims = await enqueue(client, own_worker, 5)
    for claim in claims:
        readers.read(claim.request_id)
        await async_until(lambda claim=claim: num_following(own_worker, claim.request_id) == 1)
    await client.close()
    ends = await asyncio.gather(*readers.tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [QueueClosedError] * 5
    await async_until(lambda: num_subscribers(own_worker) == 0)


async def test_a_server_that_goes_away_ends_all_streams(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some tries each of them says that the server is gone."""
    monkeypatch.setattr("promptq.producer.clients.resumable_stream.GIVE_UP_SECONDS", 0.1)
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as connection:
        worker = HandWorker(connection)
        async with redis.asyncio.Redis.from_url(server.url) as own:
            before = asyncio.all_tasks()
            client = AsyncClient(own, silence_seconds=_NO_SILENCE)
            claims = await enqueue(client, worker, 5)
            readers = Readers(client, way)
            for claim in claims:
                readers.read(claim.request_id)
                await async_until(lambda claim=claim: num_following(worker, claim.request_id) == 1)
            await asyncio.to_thread(server.stop)
            ends = await asyncio.gather(*readers.tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [RedisUnavailableError] * 5
            assert asyncio.all_tasks() == before


async def test_a_refused_channel_is_one_streams_own(
    way: str, own_worker: HandWorker, redis_url: str
) -> None:
    """A user whose ACL knows some channels only hears those, beside the errors for the others."""
    allowed = [f"mine-{number}" for number in range(16)]
    refused = [f"other-{number}" for number in range(16)]
    own_worker.redis.execute_command(
        *("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+@all", "resetchannels"),
        *(f"&{KEYS.events(request_id)}" for request_id in allowed),
    )
    ids = [request_id for pair in zip(refused, allowed, strict=True) for request_id in pair]
    async with AsyncClient(redis_url) as client:
        await client.enqueue_many([{"prompt": "Hi", "request_id": each} for each in ids])
    claims = {claim.request_id: claim for claim in (own_worker.take() for _ in ids)}
    try:
        async with connected(redis_url.replace("redis://", "redis://reader:x@")) as client:
            readers = Readers(client, way)
            for request_id in ids:
                readers.read(request_id)
                await asyncio.sleep(0.001)  # so some subscribe while others are being refused
            for task in readers.tasks[::2]:
                with pytest.raises(RedisAuthError, match="may not do this"):
                    await task
            for request_id in allowed:
                own_worker.finish(claims[request_id], "a")
            await asyncio.gather(*readers.tasks[1::2])
            assert readers.texts == ["", "a"] * len(allowed)
    finally:
        own_worker.redis.execute_command("ACL", "DELUSER", "reader")


async def test_the_connection_of_a_given_client(redis_url: str, own_worker: HandWorker) -> None:
    """The connection goes back to its pool, fit for commands, though it had been subscribed."""
    async with redis.asyncio.Redis.from_url(redis_url, max_connections=2) as own:
        client = AsyncClient(own)
        for _ in range(5):
            [claim] = await enqueue(client, own_worker, 1)
            own_worker.finish(claim, "a")
            assert (await client.result(claim.request_id)).text == "a"
        pings = await asyncio.gather(own.ping(), own.ping())
        assert pings == [True, True]
        assert num_subscribers(own_worker) == 0
