"""Both clients: what goes into the queue, what comes back, and what is said when it cannot."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel

from promptq import AsyncClient, Client
from promptq.shared.errors import (
    ConfigurationError,
    InvalidRequestError,
    QueueClosedError,
    QueueFullError,
    RedisAuthError,
    RedisUnavailableError,
    RequestExistsError,
    RequestFailedError,
)
from promptq.shared.protocol.events import ErrorInfo
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES, FinishReason, RequestState
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.scripts import heartbeat
from promptq.shared.server.connection import make_async_redis
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.playing import KEYS, losing_one_reply
from tests.support.servers import free_port

Make = Callable[..., Any]


def test_enqueue_sends_the_fields(any_client: Any, own_worker: Any) -> None:
    """The payload holds what was asked for and nothing else; the id is the caller's."""
    fields = {"max_tokens": 5, "priority": -3, "stop": ["x"], "metadata": {"a": 1}}
    request_id = any_client.enqueue("Hi", request_id="mine", **fields)
    assert request_id == "mine"
    assert own_worker.payload("mine") == {"prompt": "Hi", **fields}
    assert own_worker.take().request_id == "mine"


def test_enqueue_takes_messages_and_token_ids(any_client: Any, own_worker: Any) -> None:
    """A prompt may be token ids, or a chat."""
    messages = [{"role": "user", "content": "Hi"}]
    assert own_worker.payload(any_client.enqueue([1, 2])) == {"prompt": [1, 2]}
    assert own_worker.payload(any_client.enqueue(messages=messages)) == {"messages": messages}


@pytest.mark.parametrize("wrong", ["", "a" * 201, "a b", "a\n", "é", "\x00", "\x7f"])
def test_an_id_that_no_request_may_have_is_refused(any_client: Any, wrong: str) -> None:
    source = any_client.enqueue("Hi")
    for call in (
        lambda: any_client.enqueue("Hi", request_id=wrong),
        lambda: any_client.enqueue_many([{"prompt": "Hi", "request_id": wrong}]),
        lambda: any_client.enqueue_samples(2, "Hi", request_id=wrong),
        lambda: any_client.fork(source, at=0, fork_id=wrong),
        lambda: any_client.fork(wrong),
        lambda: any_client.result(wrong),
        lambda: any_client.cancel(wrong),
        lambda: any_client.state(wrong),
        lambda: any_client.timeline(wrong),
        lambda: list(any_client.stream(wrong)),
    ):
        with pytest.raises(InvalidRequestError, match=r"^id: .* is not 1 to 200 printable"):
            call()
    assert any_client.stats().waiting == 1


def test_enqueue_refuses_what_no_worker_would_take(any_client: Any) -> None:
    """By its size in bytes, and before it travels."""
    half = MAX_PAYLOAD_BYTES // 2
    with pytest.raises(InvalidRequestError, match=rf"^payload: {2 * half + 13} bytes are more"):
        any_client.enqueue("é" * half)
    assert any_client.enqueue("é" * (half - 7))
    assert any_client.stats().waiting == 1


@pytest.mark.parametrize("depth", [250, 300, 5000])
@pytest.mark.parametrize("field", ["prompt", "stop", "metadata", "messages"])
def test_enqueue_names_what_is_nested_too_deeply(any_client: Any, field: str, depth: int) -> None:
    """For JSON as workers read it, which is less deep than it could be written."""
    deep: dict[str, Any] = {}
    for _ in range(depth):
        deep = {"a": deep}
    values = {"prompt": None if field == "messages" else "Hi", field: deep}
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as raised:
        any_client.enqueue_many([{"prompt": "fine"}, values])
    assert raised.value.field == field
    assert any_client.stats().waiting == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", "\ud800"),
        ("stop", "\ud800"),
        ("stop", ["a", "\udfff"]),
        ("model", "\ud800"),
        ("idempotency_key", "\ud800"),
        ("metadata", {"a": ["\udfff"]}),
        ("metadata", {"\udfff": 1}),
        ("metadata", {"a": object()}),
    ],
)
def test_enqueue_names_what_is_no_json(any_client: Any, field: str, value: Any) -> None:
    """Half of a character, as wrong escapes in JSON become, is no text that can be sent."""
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as raised:
        any_client.enqueue_many([{"prompt": "fine"}, {"prompt": "Hi", field: value}])
    assert raised.value.field == field
    assert any_client.stats().waiting == 0


def test_generated_ids_are_new_and_in_order(any_client: Any) -> None:
    """UUIDv7: later ids sort behind."""
    ids = [any_client.enqueue("Hi") for _ in range(20)]
    assert ids == sorted(set(ids))


def test_enqueue_many_is_all_or_none(any_client: Any, own_worker: Any) -> None:
    """One id that is taken, or one wrong field, keeps all of them out."""
    ids = any_client.enqueue_many([{"prompt": "a", "request_id": "a"}, {"prompt": "b"}])
    assert ids[0] == "a"
    assert own_worker.queue.count() == 2
    with pytest.raises(RequestExistsError, match="'a'"):
        any_client.enqueue_many([{"prompt": "c"}, {"prompt": "a", "request_id": "a"}])
    with pytest.raises(InvalidRequestError, match="temperature"):
        any_client.enqueue_many([{"prompt": "c"}, {"prompt": "d", "temperature": 3.0}])
    assert own_worker.queue.count() == 2
    assert any_client.enqueue_many([]) == []


def test_samples_are_requests_with_different_seeds(any_client: Any, own_worker: Any) -> None:
    """`n` requests, one id and one seed apart, enqueued at once."""
    ids = any_client.enqueue_samples(3, "Hi", request_id="s", seed=7, idempotency_key="k")
    assert ids == ["s:0", "s:1", "s:2"]
    assert [own_worker.payload(request_id)["seed"] for request_id in ids] == [7, 8, 9]
    assert any_client.enqueue_samples(3, "Hi", request_id="t", idempotency_key="k") == ids
    [alone] = any_client.enqueue_samples(1, "Hi", request_id="u")
    assert alone == "u:0"
    assert "seed" not in own_worker.payload("u:0")
    with pytest.raises(InvalidRequestError, match="n: 0"):
        any_client.enqueue_samples(0, "Hi")


def test_sample_counts_the_prompt_once(any_client: Any, own_worker: Any) -> None:
    """The samples' usages are those of one call: completions add up, the prompt does not."""
    with own_worker.finishing(["ab", "cde"]):
        samples = any_client.sample(2, "Hi", request_id="s", timeout=60)
    assert samples.request_ids == ["s:0", "s:1"]
    assert samples.texts == ["ab", "cde"]
    assert (samples.usage.prompt_tokens, samples.usage.completion_tokens) == (3, 5)


def test_generate_gives_the_whole(any_client: Any, own_worker: Any) -> None:
    """Enqueue and result in one."""
    with own_worker.finishing(["abc"]):
        result = any_client.generate("Hi", max_tokens=3)
    assert (result.text, result.token_ids) == ("abc", [97, 98, 99])
    assert result.finish_reason is FinishReason.STOP


def test_a_failed_request_raises_its_reason(any_client: Any, own_worker: Any) -> None:
    """`result` raises what went wrong, or with check=False gives it."""
    request_id = any_client.enqueue("Hi")
    error = ErrorInfo(type="invalid_request", message="prompt: is too long")
    own_worker.send(own_worker.take(), "ab", FinishReason.ERROR, error=error)
    with pytest.raises(RequestFailedError, match="prompt: is too long") as raised:
        any_client.result(request_id)
    assert raised.value.error_type == "invalid_request"
    result = any_client.result(request_id, check=False)
    assert (result.text, result.error) == ("ab", error)
    assert list(any_client.stream(request_id))[-1].error == error


def test_result_gives_up_after_its_timeout(any_client: Any) -> None:
    """The request goes on; only the wait is over."""
    request_id = any_client.enqueue("Hi")
    with pytest.raises(TimeoutError, match=request_id):
        any_client.result(request_id, timeout=0.01)
    assert any_client.state(request_id) is RequestState.WAITING


def test_cancel(any_client: Any, own_worker: Any) -> None:
    """A waiting request ends at once. The worker ends a running one, with the usage so far."""
    waiting, running = any_client.enqueue("Hi"), any_client.enqueue("Hi", priority=-1)
    claim = own_worker.take()
    own_worker.send(claim, "ab")
    assert any_client.cancel(waiting) is CancelStatus.CANCELLED
    assert any_client.cancel(running) is CancelStatus.FLAGGED
    own_worker.send(claim, "more")
    result = any_client.result(running)
    assert (result.text, result.finish_reason) == ("ab", FinishReason.CANCELLED)
    assert result.usage.completion_tokens == 2
    assert any_client.result(waiting).finish_reason is FinishReason.CANCELLED
    assert any_client.cancel(running) is CancelStatus.FINISHED
    assert any_client.cancel("nobody") is CancelStatus.UNKNOWN


def test_state(any_client: Any, own_worker: Any) -> None:
    """A request's life as its client sees it."""
    request_id = any_client.enqueue("Hi")
    assert any_client.state(request_id) is RequestState.WAITING
    claim = own_worker.take()
    assert any_client.state(request_id) is RequestState.ACTIVE
    own_worker.finish(claim)
    assert any_client.state(request_id) is RequestState.COMPLETED
    assert any_client.state("nobody") is None


def test_delay(any_client: Any, own_worker: Any) -> None:
    """A delayed request is not handed out yet, but is known."""
    request_id = any_client.enqueue("Hi", delay_ms=3_600_000)
    assert own_worker.queue.is_empty()
    assert any_client.state(request_id) is RequestState.WAITING
    assert any_client.stats().delayed == 1
    for field, wrong in (("delay_ms", -1), ("delay_ms", 10**5000), ("deadline_ms", 10**400)):
        with pytest.raises(InvalidRequestError, match=field):
            any_client.enqueue("Hi", **{field: wrong})


def test_a_full_queue_says_when_to_come_back(any_client: Any, own_worker: Any) -> None:
    """The limit is the queue's own."""
    own_worker.redis.hset(KEYS.config, "max_pending", 1)
    any_client.enqueue("Hi")
    with pytest.raises(QueueFullError) as raised:
        any_client.enqueue("Hi")
    assert raised.value.retry_after_ms > 0


def test_stats(any_client: Any, own_worker: Any) -> None:
    """Counts by place, and the workers whose heartbeat is fresh."""
    any_client.enqueue_many([{"prompt": "Hi"}] * 3)
    own_worker.take()
    for worker_id, ttl_ms in (("w1", 60_000), ("w2", 60_000), ("gone", 1)):
        own_worker.queue.run(heartbeat(WorkerStats(worker_id=worker_id, max_num_seqs=4), ttl_ms))
    while own_worker.redis.exists(KEYS.worker("gone")):
        pass
    stats = any_client.stats()
    assert (stats.waiting, stats.active, stats.delayed, stats.dead) == (2, 1, 0, 0)
    assert sorted(worker.worker_id for worker in stats.workers) == ["w1", "w2"]
    assert stats.workers[0].max_num_seqs == 4


def test_a_closed_client(make_client: Make, redis_url: str) -> None:
    """A closed client refuses further use."""
    client = make_client(redis_url)
    request_id = client.enqueue("Hi")
    client.close()
    with pytest.raises(QueueClosedError):
        client.enqueue("Hi")
    with pytest.raises(QueueClosedError):
        list(client.stream(request_id))


def test_queues_are_apart(make_client: Make, redis_url: str) -> None:
    """Another queue knows nothing of this one's requests."""
    request_id = make_client(redis_url).enqueue("Hi")
    other = make_client(redis_url, "other")
    assert other.state(request_id) is None
    assert other.stats().waiting == 0
    with pytest.raises(ConfigurationError, match="queue"):
        make_client(redis_url, "no such name")


def test_a_dropped_connection_is_survived(
    make_client: Make, redis_url: str, kind: str, own_worker: Any
) -> None:
    """The server cuts every subscriber off in mid-stream, again and again; nothing is missing."""
    client = make_client(redis_url, silence_seconds=60)
    request_id = client.enqueue("Hi")
    claim = own_worker.take()
    events: list[Any] = []
    arrived = threading.Condition()

    def add(event: Any) -> None:
        with arrived:
            events.append(event)
            arrived.notify()

    async def read_async() -> None:
        async with AsyncClient(redis_url, silence_seconds=60) as reader:
            async for event in reader.stream(request_id):
                add(event)

    def read_sync() -> None:
        for event in client.stream(request_id):
            add(event)

    def read() -> None:
        read_sync() if kind == "sync" else asyncio.run(read_async())

    reader = threading.Thread(target=read)
    reader.start()
    for text in "abcdefgh":
        own_worker.send(claim, text)
        with arrived:
            arrived.wait_for(lambda text=text: events and events[-1].text == text)
        own_worker.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    own_worker.finish(claim)
    reader.join()
    assert "".join(event.text for event in events) == "abcdefgh"
    assert [event.index for event in events] == [*range(8), 8]


def test_a_server_that_goes_away_ends_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tries the stream says that the server is gone."""
    monkeypatch.setattr("promptq.producer.clients.resumable_stream.GIVE_UP_SECONDS", 0.1)
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as connection:
        client = Client(connection, silence_seconds=0.05)
        request_id = client.enqueue("Hi")
        stopper = threading.Timer(0.2, server.stop)
        stopper.start()
        with pytest.raises(RedisUnavailableError, match=str(server.port)):
            list(client.stream(request_id))
        stopper.join()


@pytest.mark.parametrize("request_id", [None, "mine"])
def test_a_lost_reply_to_enqueue(make_client: Make, redis_url: str, request_id: str | None) -> None:
    """The call is repeated, and the server knows it for the same."""
    with losing_one_reply(redis_url, to=b"EVALSHA") as url:
        client = make_client(url)
        client.stats()
        if request_id is None:
            [first, second] = client.enqueue_many([{"prompt": "a"}, {"prompt": "b"}])
            assert client.state(first) is client.state(second) is RequestState.WAITING
        else:
            assert client.enqueue("Hi", request_id="mine") == "mine"
            with pytest.raises(RequestExistsError, match="'mine'"):
                client.enqueue("Hi", request_id="mine")
        assert client.stats().waiting == (2 if request_id is None else 1)
        client.close()


def test_a_given_redis_client_is_used_and_left_open(redis_url: str) -> None:
    """The client stays its owner's."""
    with redis.Redis.from_url(redis_url) as connection:
        before = connection.client_id()
        with Client(connection) as client:
            client.enqueue("Hi")
        assert connection.client_id() == before


async def test_a_given_async_redis_client_is_used_and_left_open(redis_url: str) -> None:
    """The client stays its owner's."""
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        before = await connection.client_id()
        async with AsyncClient(connection) as client:
            await client.enqueue("Hi")
        assert await connection.client_id() == before


def test_a_redis_client_that_decodes_is_refused(redis_url: str) -> None:
    """Events are bytes; the message says what to do."""
    with (
        redis.Redis.from_url(redis_url, decode_responses=True) as connection,
        pytest.raises(ConfigurationError, match="decode_responses"),
    ):
        Client(connection)


async def test_many_streams_at_once(redis_url: str, own_worker: Any) -> None:
    """One async client reads many streams side by side, each its own."""
    async with AsyncClient(redis_url) as client:
        ids = await client.enqueue_many([{"prompt": "Hi"}] * 20)
        readers = [asyncio.create_task(client.result(request_id)) for request_id in ids]
        for n in range(20):
            claim = await asyncio.to_thread(own_worker.take)
            await asyncio.to_thread(own_worker.finish, claim, chr(ord("a") + n))
        results = await asyncio.gather(*readers)
    assert "".join(result.text for result in results) == "abcdefghijklmnopqrst"


def test_many_threads_at_once(redis_url: str, own_worker: Any) -> None:
    """More than redis-py would give connections to, each with a stream of its own."""
    with ThreadPoolExecutor(130) as pool, Client(redis_url) as client:
        ids = client.enqueue_many([{"prompt": "Hi"}] * 130)
        readers = [pool.submit(client.result, request_id) for request_id in ids]
        while len(own_worker.redis.pubsub_channels()) < 130:
            assert not any(reader.done() for reader in readers), "some could not listen"
            time.sleep(0.01)
        for _ in ids:
            own_worker.finish(own_worker.take(), "a")
        assert [reader.result().text for reader in readers] == ["a"] * 130


@pytest.mark.parametrize("limit", [None, 2, 100], ids=["own", "given 2", "given 100"])
async def test_many_calls_at_once(redis_url: str, own_worker: Any, limit: int | None) -> None:
    """More than there may be connections: they wait for their turn, and streams go on beside."""
    async with AsyncExitStack() as stack:
        server: Any = redis_url
        if limit is not None:
            server = redis.asyncio.Redis.from_url(redis_url, max_connections=limit)
            await stack.enter_async_context(server)
        client = await stack.enter_async_context(AsyncClient(server))
        ids = await asyncio.gather(*(client.enqueue("Hi") for _ in range(150)))
        readers = [asyncio.create_task(client.result(request_id)) for request_id in ids]
        states = await asyncio.gather(*(client.state(request_id) for request_id in ids))
        assert states == [RequestState.WAITING] * 150
        for _ in ids:
            claim = await asyncio.to_thread(own_worker.take)
            await asyncio.to_thread(own_worker.finish, claim, "a")
        assert [result.text for result in await asyncio.gather(*readers)] == ["a"] * 150


async def test_closing_ends_calls_that_wait_for_their_turn(redis_url: str) -> None:
    """They are not sent on a connection opened anew."""
    client = AsyncClient(redis_url)
    await client.enqueue("Hi")
    calls = [asyncio.create_task(client.enqueue("Hi")) for _ in range(300)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await client.close()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[-1], QueueClosedError)


async def test_a_cancelled_task_ends(redis_url: str) -> None:
    """Whenever a task is cancelled, also while it connects, its wait is over."""
    async with AsyncClient(redis_url) as client:
        request_id = await client.enqueue("Hi")
        for n in range(100):
            waiting = asyncio.create_task(client.result(request_id))
            await asyncio.sleep(n * 0.00005)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting


async def test_leaving_a_stream_early(redis_url: str, own_worker: Any) -> None:
    """A loop that is left closes its subscription; the request goes on."""
    async with AsyncClient(redis_url) as client:
        request_id = await client.enqueue("Hi")
        claim = own_worker.take()
        own_worker.send(claim, "a")
        stream = client.stream(request_id)
        async for event in stream:
            assert event.text == "a"
            break
        await stream.aclose()
        own_worker.finish(claim, "b")
        assert (await client.result(request_id)).text == "ab"


def test_no_server_anywhere(make_client: Make, no_server: None) -> None:
    """Without a URL and without `promptq up`, the error says what to start."""
    with pytest.raises(RedisUnavailableError, match=r"promptq up.*PROMPTQ_REDIS_URL"):
        make_client()


def test_the_url_of_the_settings(
    make_client: Make, no_server: None, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMPTQ_REDIS_URL goes before the running `promptq up`."""
    with EmbeddedServer(is_advertised=True):
        monkeypatch.setenv("PROMPTQ_REDIS_URL", redis_url)
        request_id = make_client().enqueue("Hi")
    assert make_client(redis_url).state(request_id) is RequestState.WAITING


def test_the_advertised_server(make_client: Make, no_server: None) -> None:
    """A server of `promptq up` is found without an address."""
    with EmbeddedServer(is_advertised=True) as server:
        request_id = make_client().enqueue("Hi")
        assert make_client(server.url).state(request_id) is RequestState.WAITING


def test_a_role_that_may_not(make_client: Make) -> None:
    """A user whose ACL keeps it out is told so."""
    with EmbeddedServer() as server:
        with redis.Redis.from_url(server.url) as connection:
            connection.execute_command("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+info")
        client = make_client(f"redis://reader:x@127.0.0.1:{server.port}/0")
        with pytest.raises(RedisAuthError, match="the user 'reader' may not do this"):
            client.enqueue("Hi")


ADDRESSES = {
    "redis://me:secret@localhost:1": "redis://localhost:1",
    "redis://[::1]:1/2": "redis://[::1]:1/2",
    "rediss://:secret@localhost:1/0": "rediss://localhost:1",
    "unix:///run/sock": "unix:///run/sock",
    "redis+sentinel://:secret@a:1,b:2/service/3": "redis+sentinel://a:1,b:2/service/3",
    "rediss+sentinel://a:1/service": "rediss+sentinel://a:1/service",
    "redis+cluster://a:1,b:2": "redis+cluster://a:1,b:2",
    "rediss+cluster://:secret@a:1": "rediss+cluster://a:1",
}


@pytest.mark.parametrize("url", ADDRESSES)
async def test_errors_name_the_server_of_a_client_of_redis_py(url: str) -> None:
    async with make_async_redis(url) as server:
        assert AsyncClient(server).url == ADDRESSES[url]
    if "+" not in url:
        with redis.Redis.from_url(url) as sync_server:
            assert Client(sync_server).url == ADDRESSES[url]


def test_an_error_of_sentinels_does_not_show_their_options() -> None:
    port = free_port()
    sentinels = redis.sentinel.Sentinel([("127.0.0.1", port)], sentinel_kwargs={"password": "pw"})
    with pytest.raises(RedisUnavailableError) as raised:
        Client(sentinels.master_for("it")).enqueue("Hi")
    assert str(raised.value) == (
        f"no Redis server answers at redis+sentinel://127.0.0.1:{port}/it: No master found for"
        " 'it'; a sentinel does not answer, or refuses the connection or its credentials"
    )


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without settings and without a running `promptq up`."""
    monkeypatch.delenv("PROMPTQ_REDIS_URL", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
