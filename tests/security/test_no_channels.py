"""A user who may do anything but use channels, as Redis 7 makes new users, is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import redis
import redis.asyncio
from redis.exceptions import NoPermissionError

from promptq import AsyncClient, Client
from promptq.producer.calls import errors
from promptq.shared.errors import RedisAuthError
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.worker import Worker
from tests.producer.gateway.living import live_gateway
from tests.producer.playing import Run
from tests.support.model_free import served_model_free
from tests.support.requests import ROOM, put, row
from tests.support.roles import as_role
from tests.support.waiting import until

GRANT = "a user made by hand needs channels too: ACL SETUSER "


@pytest.fixture(params=["embedded_url", "redis_server_url"])
def everybody(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """The default user of an empty server, beside whom there is a user without channels."""
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        client.flushall()
        rules = ("reset", "on", ">p", "~*", "+@all")
        client.execute_command("ACL", "SETUSER", "handmade", *rules)
        yield client
        client.acl_deluser("handmade")


@pytest.fixture
def handmade(everybody: redis.Redis) -> str:
    port = everybody.connection_pool.connection_kwargs["port"]
    return f"redis://handmade:p@127.0.0.1:{port}/0"


async def test_a_worker_does_not_start(everybody: redis.Redis, handmade: str) -> None:
    put(RequestQueue(everybody), "waits")
    async with redis.asyncio.Redis.from_url(handmade) as client:
        worker = Worker(WorkerSettings(), served_model_free(), client)
        with pytest.raises(NoPermissionError, match="channel"):
            await worker.start()
        assert not worker.health.has_started
    assert RequestQueue(everybody).state("waits") is RequestState.WAITING


async def test_a_worker_that_may_publish_but_not_listen_does_not_start(
    everybody: redis.Redis, handmade: str
) -> None:
    for rules in (("&promptq:*", "-subscribe"), ("+subscribe", "resetchannels", "&*:control")):
        everybody.execute_command("ACL", "SETUSER", "handmade", *rules, "&*:events:*")
        async with redis.asyncio.Redis.from_url(handmade) as client:
            with pytest.raises(NoPermissionError):
                await Worker(WorkerSettings(), served_model_free(), client).start()


def test_a_client_is_refused_before_anything_has_changed(
    everybody: redis.Redis, handmade: str
) -> None:
    queue = RequestQueue(everybody)
    put(queue, "runs")
    queue.take_batch(ROOM)
    put(queue, "waits")
    calls: tuple[Callable[[Client], object], ...] = (
        lambda client: client.enqueue("Hi", request_id="new"),
        lambda client: client.cancel("runs"),
        lambda client: client.cancel("waits"),
        lambda client: client.drain(),
        lambda client: next(client.stream("runs")),
    )
    with Client(handmade) as client:
        for call in calls:
            with pytest.raises(
                RedisAuthError, match=f"the user 'handmade' may not .*{GRANT}handmade"
            ):
                call(client)
        assert client.stats().waiting == 1
    assert not everybody.exists(queue.keys.request("new"))
    assert not everybody.hexists(queue.keys.request("runs"), "cancelled")
    assert queue.state("waits") is RequestState.WAITING


async def test_an_async_client_is_refused_too(everybody: redis.Redis, handmade: str) -> None:
    put(RequestQueue(everybody), "waits")
    async with AsyncClient(handmade) as client:
        with pytest.raises(RedisAuthError, match="channel"):
            await client.enqueue("Hi")
        with pytest.raises(RedisAuthError, match="channel"):
            await anext(client.stream("waits"))


def test_a_publish_is_refused_as_a_whole(everybody: redis.Redis, handmade: str) -> None:
    """Half of one would leave an event in the log that nobody hears, and a lease that crashes."""
    queue = RequestQueue(everybody)
    put(queue, "a")
    (claim,) = queue.take_batch(ROOM)
    with redis.Redis.from_url(handmade) as client, pytest.raises(NoPermissionError):
        RequestQueue(client).publish([row(claim, 0, reason=FinishReason.STOP)])
    assert not everybody.exists(queue.keys.tokens("a"))
    assert queue.state("a") is RequestState.ACTIVE
    queue.publish([row(claim, 0, reason=FinishReason.STOP)])
    assert queue.state("a") is RequestState.COMPLETED


def test_a_gateway_says_so_before_the_first_call(
    handmade: str, capfd: pytest.CaptureFixture[str]
) -> None:
    errors._log_refusal.cache_clear()
    with live_gateway(handmade) as gateway:
        answer = httpx2.get(f"{gateway.url}/readyz", timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
    out, err = capfd.readouterr()
    [line] = [it for it in (out + err).splitlines() if GRANT in it]
    assert "the user 'handmade'" in line


def test_so_does_one_that_may_publish_but_not_listen(
    everybody: redis.Redis, handmade: str, capfd: pytest.CaptureFixture[str]
) -> None:
    errors._log_refusal.cache_clear()
    everybody.execute_command("ACL", "SETUSER", "handmade", "&promptq:*", "-subscribe")
    shown: list[str] = []

    def says_who() -> bool:
        shown.extend(capfd.readouterr())
        return "the user 'handmade'" in "".join(shown)

    with live_gateway(handmade):
        until(says_who)
    assert "no permissions" in "".join(shown)


def test_each_process_ends_with_one_sentence(redis_url: str, run: Run, tmp_path: Path) -> None:
    """Whole processes, because their first lines are the point."""
    with redis.Redis.from_url(as_role("", redis_url)) as client:
        client.execute_command("ACL", "SETUSER", "handmade", "reset", "on", ">p", "~*", "+@all")
        port = client.connection_pool.connection_kwargs["port"]
        url = f"redis://handmade:p@127.0.0.1:{port}/0"
        for command in (("worker", "--model", "model-free"), ("jobs",)):
            done = run(*command, url=url, PROMPTQ_FILES_DIR=str(tmp_path))
            [line] = done.stderr.splitlines()
            assert (done.returncode, done.stdout) == (1, "")
            assert "the user 'handmade' may not" in line
            assert f"{GRANT}handmade '&promptq:*'; the server at" in line
        client.acl_deluser("handmade")
