"""Connections: what is wrong is said in one sentence, and one that drops is opened again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import AsyncClient, Client
from promptq.shared.errors import (
    ConfigurationError,
    RedisAuthError,
    RedisSideError,
    RedisTooOldError,
    RedisUnavailableError,
)
from promptq.shared.server.connection import (
    check_version,
    explain,
    make_async_redis,
    open_async_redis,
    open_redis,
    without_password,
)
from tests.support.network import Network
from tests.support.roles import as_role
from tests.support.servers import OwnServer, assert_no_answer_to_another_call


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("redis://me:secret@host/0", "redis://me:***@host/0"),
        ("redis://host?password=secret&db=1", "redis://host?password=***&db=1"),
        ("redis://me:secret@[::1", "redis://me:***@[::1"),
        ("redis://:abc/K+9=@host:1/0", "redis://:***@host:1/0"),
        ("rediss://me:a#b?c:d@e[f@host", "rediss://me:***@host"),
        ("redis://secret@host", "redis://***@host"),
        ("redis://sec/ret:a@host", "redis://***@host"),
        ("redis+sentinel://:a/b@one:1,two:2/it", "redis+sentinel://:***@one:1,two:2/it"),
        ("redis+sentinel://:a@one,:b/c@two/it", "redis+sentinel://:***@two/it"),
        (
            "redis+sentinel://one/it?sentinel_password=a/b",
            "redis+sentinel://one/it?sentinel_password=***",
        ),
        ("redis://:secret@host?password=secret", "redis://:***@host?password=***"),
        ("redis://host?password=sec@ret", "redis://***"),
        ("redis://:sec?password=ret@host", "redis://***"),
        ("me:secret@host:1", "me:***@host:1"),
    ],
)
def test_shows_no_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


NO_URL = r"^redis: .* is not a Redis URL.*redis://localhost:6379"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://host",
        "redis://[::1",
        "redis://host:port",
        "redis://host?foo=1",
    ],
)
async def test_says_that_a_url_is_none(url: str) -> None:
    with pytest.raises(ConfigurationError, match=NO_URL):
        open_redis(url)
    with pytest.raises(ConfigurationError, match=NO_URL):
        await open_async_redis(url)


PLACES = {
    "redis": "host:1/0",
    "rediss": "host:1/0",
    "unix": "/run/sock",
    "redis+sentinel": "host:1,host:2/it",
    "redis+cluster": "host:1,host:2",
}


@pytest.mark.parametrize("scheme", PLACES)
@pytest.mark.parametrize(
    "option",
    [
        *("decode_responses=True", "encoding=latin-1", "encoding_errors=ignore"),
        *("protocol=4", "socket_timeout=0", "socket_timeout=nan", "socket_timeout=-1"),
        *("socket_connect_timeout=0", "socket_read_size=0", "health_check_interval=-1"),
        *("max_connections=0", "max_connections=1", "client_name=a%20b", "db=-1", "db=prod"),
        *("retry=3", "retry_on_error=TimeoutError", "single_connection_client=true", "timeout=3"),
        *("parser_class=x", "connection_class=x", "credential_provider=x", "cache=x", "foo=1"),
        *("socket_keepalive_options=x", "legacy_responses=false", "redis_connect_func=x"),
        *("command_packer=x", "maint_notifications_config=x", "event_dispatcher=x", "host=other"),
        *("decode_response=1", "db=", "db", "client_name="),
    ],
)
def test_refuses_an_option_that_would_break_it_by_name(scheme: str, option: str) -> None:
    name = option.partition("=")[0]
    url = f"{scheme}://:secret@{PLACES[scheme]}?socket_timeout=3&{option}"
    for connect in (open_redis, make_async_redis):
        with pytest.raises(ConfigurationError, match=rf"option '?{name}\b") as raised:
            connect(url)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", sorted(PLACES.keys() - {"rediss"}))
def test_refuses_options_of_tls_where_there_is_none(scheme: str) -> None:
    for connect in (open_redis, make_async_redis):
        with pytest.raises(ConfigurationError, match="option 'ssl_cert_reqs' is for rediss://"):
            connect(f"{scheme}://{PLACES[scheme]}?ssl_cert_reqs=none")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # redis-py's, of `lib_name`
async def test_takes_every_option_that_does_no_harm(redis_url: str) -> None:
    options = (
        "decode_responses=False&encoding=UTF-8&encoding_errors=strict&protocol=3&socket_timeout=2"
        "&socket_connect_timeout=2.5&socket_keepalive=no&retry_on_timeout=yes"
        "&max_connections=2&health_check_interval=1&client_name=me&lib_name=it&lib_version=1"
    )
    request_id = "caf-1"
    with Client(f"{redis_url}?{options}") as client:
        client.enqueue("Café \U0001f98a", request_id=request_id)
        assert client.stats().waiting == 1
    async with AsyncClient(f"{redis_url}?{options}") as async_client:
        await async_client.cancel(request_id)
        assert [it.finish_reason async for it in async_client.stream(request_id)] == ["cancelled"]


@pytest.mark.parametrize("place", ["host/prod", "host/0x1", "host/-1", "host/0/1", "host/1.5"])
@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel"])
def test_a_database_is_a_number(scheme: str, place: str) -> None:
    if scheme == "redis+sentinel":
        place = place.replace("host/", "host/service/")
    with pytest.raises(ConfigurationError, match=r"the database '\S+' is not a number"):
        open_redis(f"{scheme}://:secret@{place}")


@pytest.mark.parametrize("scheme", PLACES)
def test_nothing_of_a_url_is_left_out_silently(scheme: str) -> None:
    """A fragment would be, so `#1` would mean the database 0."""
    with pytest.raises(ConfigurationError, match="nothing may follow a #"):
        open_redis(f"{scheme}://:secret@{PLACES[scheme]}#1")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "redis+sentinel"])
@pytest.mark.parametrize(
    "password", ["12/cret", "#cret", "se?cret", "12?se=cret", "se[cret", "cr%℀"]
)
async def test_says_that_a_password_must_be_encoded(scheme: str, password: str) -> None:
    """And repeats no piece of it. Some would be taken for a server's name and port."""
    place = {"unix": "/run/sock", "redis+sentinel": "host:1,host:2/it"}.get(scheme, "host:1/0")
    url = f"{scheme}://:{password}@{place}"
    said = rf"^redis: '{re.escape(scheme)}://:\*\*\*@{place}' .*percent-encoded.*:a%2Fb%23@"
    with pytest.raises(ConfigurationError, match=said) as raised:
        open_redis(url)
    assert not re.search("12|cret|se=", str(raised.value))
    assert raised.value.__suppress_context__, "it may show more"
    with pytest.raises(ConfigurationError, match=said):
        await open_async_redis(url)


@pytest.mark.parametrize("login", ["", "me:pw@"])
async def test_a_socket_may_have_an_at_in_its_name(login: str, tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailableError, match="No such file"):
        open_redis(f"unix://{login}{tmp_path}/run@host.sock")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("host:port", "'port'"),
        ("[::1", "IPv6"),
        ("host?foo=1", "'foo'"),
        ("host?db=x", "'db'"),
    ],
)
async def test_says_what_is_wrong_beside_a_password(place: str, said: str) -> None:
    for url in (f"redis://me:se%2Fcret@{place}", f"redis://me:se/cret@{place}"):
        with pytest.raises(ConfigurationError, match=rf"me:\*\*\*@.*{said}") as raised:
            open_redis(url)
        assert "cret" not in str(raised.value)
        with pytest.raises(ConfigurationError, match=said):
            await open_async_redis(url)


@pytest.mark.parametrize(
    ("info", "is_enough"),
    [
        ({"redis_version": "7.0.0"}, True),
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, False),
        ({}, False),
    ],
)
def test_needs_redis_7_or_valkey_8(info: dict[str, str], is_enough: bool) -> None:
    if is_enough:
        check_version(info, "redis://host")
    else:
        with pytest.raises(RedisTooOldError):
            check_version(info, "redis://host")


def test_explains_what_the_client_library_raises() -> None:
    url = "redis://:secret@host"
    explained = [
        (redis.exceptions.AuthenticationError("no"), RedisAuthError),
        (redis.exceptions.ResponseError("NOAUTH needed"), RedisAuthError),
        (redis.exceptions.NoPermissionError("no permissions"), RedisAuthError),
        (redis.exceptions.ResponseError("WRONGTYPE Operation"), RedisSideError),
        (redis.exceptions.ConnectionError("refused."), RedisUnavailableError),
        (redis.exceptions.MaxConnectionsError("too many"), RedisUnavailableError),
        (OSError("unreachable"), RedisUnavailableError),
    ]
    for error, expected in explained:
        sentence = explain(error, url)
        assert type(sentence) is expected
        assert "secret" not in str(sentence)
        assert not str(sentence).endswith("."), "more may follow"


@pytest.mark.parametrize("place", ["9b1e1cafe, on @user_script:7", "on @user_script:7"])
def test_a_place_in_a_script_is_left_out_and_the_reason_is_not(place: str) -> None:
    """Redis 7 and Valkey 9. In Valkey the reason itself has the word before the place."""
    reason = "ACL failure in script: No permissions to access a key"
    sentence = explain(
        redis.exceptions.NoPermissionError(f"{reason} script: {place}."), "redis://h"
    )
    assert str(sentence).endswith(f"said: {reason}")


async def test_a_connection_that_was_dropped_is_opened_again(redis_url: str) -> None:
    with open_redis(redis_url) as client, redis.Redis.from_url(as_role("", redis_url)) as other:
        other.client_kill_filter(_type="normal", skipme=True)
        assert client.ping()
    client = await open_async_redis(redis_url)
    with redis.Redis.from_url(as_role("", redis_url)) as other:
        other.client_kill_filter(_type="normal", skipme=True)
    assert await client.ping()
    await client.aclose()


@pytest.mark.parametrize("package", ["asyncio", "uvloop"])
def test_a_connection_that_the_server_has_just_closed_is_opened_again(
    package: str, redis_url: str
) -> None:
    """Before the event loop could report that. uvloop is the gateway's."""
    loops = pytest.importorskip(package)

    async def call_twice() -> None:
        client = await open_async_redis(redis_url)
        assert await client.exists("promptq:{a}:request:nothing") == 0
        pool: Any = client.connection_pool
        [connection] = pool._available_connections
        connection._writer.transport.abort()
        assert await client.exists("promptq:{a}:request:nothing") == 0
        await client.aclose()

    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        runner.run(call_twice())


async def test_a_url_says_how_long_an_answer_is_waited_for(redis_url: str) -> None:
    """By default longer: who says less has given up when who says nothing gets an answer."""
    network = Network(redis.connection.parse_url(redis_url)["port"])
    hasty_url = f"{network.url}?socket_timeout=0.1"
    with (
        ThreadPoolExecutor() as pool,
        open_redis(network.url) as patient,
        open_redis(hasty_url) as hasty,
    ):
        asynchronous = await open_async_redis(hasty_url)
        network.hold()
        waiting = pool.submit(patient.ping)
        with pytest.raises(redis.TimeoutError):
            hasty.ping()
        with pytest.raises(redis.TimeoutError):
            await asynchronous.ping()
        network.mend()
        assert waiting.result()
        await asynchronous.aclose()
    network.close()


async def test_a_command_makes_no_task(redis_url: str) -> None:
    client = await open_async_redis(redis_url)
    loop, made = asyncio.get_running_loop(), []

    def make_task(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make_task)
    assert await client.ping()
    assert made == []
    loop.set_task_factory(None)
    await client.aclose()


async def test_a_small_command_sets_a_timer_only_for_its_answer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await open_async_redis(redis_url)
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def set_timer(when: float, callback: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(callback)
        return call_at(when, callback, *args, **options)

    monkeypatch.setattr(loop, "call_at", set_timer)
    assert await client.ping()
    assert len(timers) == 1
    await client.aclose()


async def test_a_server_that_reads_nothing_is_left(redis_url: str) -> None:
    network = Network(redis.connection.parse_url(redis_url)["port"])
    client = await open_async_redis(f"{network.url}?socket_timeout=0.1")
    network.hold()
    with pytest.raises(redis.TimeoutError, match="Timeout writing to socket"):
        await client.echo("a" * 2**25)
    network.mend()
    await client.aclose()
    network.close()


async def test_nobody_gets_an_answer_to_somebody_else(redis_url: str) -> None:
    await assert_no_answer_to_another_call(redis_url)


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[tuple[Network, OwnServer, OwnServer]]:
    """An address that leads to the first of two servers."""
    with OwnServer(tmp_path / "old") as old, OwnServer(tmp_path / "new") as new:
        network = Network(old.port)
        yield network, old, new
        network.close()


def move(network: Network, old: OwnServer, new: OwnServer) -> None:
    """The address leads to the second server now; the first is its replica, and still answers."""
    with old.client() as client:
        client.replicaof("127.0.0.1", new.port)
    network.lead_to(new.port)


async def test_a_server_that_became_a_replica_is_left_for_where_its_address_leads(
    moved: tuple[Network, OwnServer, OwnServer],
) -> None:
    network, old, new = moved
    with open_redis(network.url) as client, new.client() as at_new:
        asynchronous = await open_async_redis(network.url)
        client.set("promptq:{a}:request:who", "sync")
        await asynchronous.set("promptq:{a}:request:who", "async")
        move(network, old, new)
        client.set("promptq:{a}:request:who", "sync again")
        assert at_new.get("promptq:{a}:request:who") == b"sync again"
        await asynchronous.set("promptq:{a}:request:who", "async again")
        assert at_new.get("promptq:{a}:request:who") == b"async again"
        await asynchronous.aclose()


def test_a_server_that_stays_a_replica_is_named_as_what_it_is(
    moved: tuple[Network, OwnServer, OwnServer],
) -> None:
    network, old, new = moved
    with open_redis(network.url) as client:
        move(network, old, new)
        network.lead_to(old.port)
        with pytest.raises(redis.exceptions.ReadOnlyError):
            client.set("promptq:{a}:request:k", "1")
