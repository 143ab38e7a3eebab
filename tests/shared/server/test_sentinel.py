"""Clients that find their server through Sentinel."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import AsyncClient, Client
from promptq.shared.errors import ConfigurationError, RedisUnavailableError
from promptq.shared.server.connection import open_async_redis, open_redis
from tests.faults.sentinels import (
    ALONE,
    SERVICE,
    Guarded,
    guarded_by_three,
    is_found,
    of_master,
    sentinel,
)
from tests.support.network import Network
from tests.support.requests import KINDS
from tests.support.roles import as_role
from tests.support.servers import (
    NO_TLS,
    OwnServer,
    assert_no_answer_to_another_call,
    free_port,
    free_ports,
    make_certificates,
    tls_settings,
)
from tests.support.waiting import until


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with guarded_by_three(tmp_path) as guarded:
        yield guarded


def test_a_url_of_sentinels_says_what_is_wrong(guarded: Guarded) -> None:
    for url in ("redis+sentinel://host", "redis+sentinel:///service", "redis+sentinel://h:x/s"):
        with pytest.raises(ConfigurationError, match="is not a Redis URL"):
            open_redis(url)
    with pytest.raises(RedisUnavailableError, match="No master found for 'another'"):
        open_redis(guarded.url.replace(SERVICE, "another"))


def test_an_interrupted_call_leaves_no_reply_for_the_next(guarded: Guarded) -> None:
    """An exception in a signal's handler ends the call, as when one of RQ's workers is stopped."""

    def raise_error(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt() -> None:
        with guarded.master.client() as server:
            until(lambda: server.info("clients")["blocked_clients"] == 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    earlier, waiting = (
        signal.signal(signal.SIGUSR1, raise_error),
        threading.Thread(target=interrupt),
    )
    with open_redis(as_role("jobs", guarded.url)) as client:
        queue = "rq:queue:promptq-default-upkeep"
        waiting.start()
        with pytest.raises(KeyboardInterrupt):
            client.blmove(queue, f"{queue}:intermediate", 1)
        assert client.rpush(queue, "a") == 1
    waiting.join()
    signal.signal(signal.SIGUSR1, earlier)


async def test_nobody_gets_an_answer_to_somebody_else(guarded: Guarded) -> None:
    await assert_no_answer_to_another_call(guarded.url)


async def test_a_change_of_the_master_interrupts_no_call(guarded: Guarded) -> None:
    """The pool then closes connections. Others may just be asking a sentinel, or the master."""
    async with await open_async_redis(guarded.url) as client:
        pool: Any = client.connection_pool

        async def ask_sentinels() -> set[tuple[str, int]]:
            return {await pool.sentinel_manager.discover_master(SERVICE) for _ in range(20)}

        async def ask_master() -> list[bytes]:
            return [await client.echo(f"{each}") for each in range(100)]

        asking_sentinels = [asyncio.create_task(ask_sentinels()) for _ in range(8)]
        asking_master = [asyncio.create_task(ask_master()) for _ in range(8)]
        while not all(task.done() for task in asking_sentinels + asking_master):
            await pool.disconnect(inuse_connections=False)
            await asyncio.sleep(0)
        for told in await asyncio.gather(*asking_sentinels):
            assert told == {("127.0.0.1", guarded.master.port)}
        assert pool._available_connections
        await pool.disconnect(inuse_connections=False)
        assert not any(it.is_connected for it in pool._available_connections), "idle ones close"
        for said in await asyncio.gather(*asking_master):
            assert said == [f"{each}".encode() for each in range(100)]


@pytest.fixture
def asks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes clients ask a sentinel before each call."""
    monkeypatch.setattr("promptq.shared.server.sentinel._FRESH_SECONDS", 0.0)
    monkeypatch.setattr("promptq.shared.server.sentinel._MOST_TIME_ASKING", math.inf)


def naming(folder: Path, port: int, master: OwnServer, epoch: int) -> Any:
    """Starts a sentinel that names a server as the master after this number of failovers."""
    text = f"port {port}\n{ALONE.format(folder=folder, service=SERVICE, master=master.port)}"
    return sentinel(folder, f"{text}sentinel config-epoch {SERVICE} {epoch}\n")


async def states_in(client: Client, asynchronous: AsyncClient, request_id: str) -> list[Any]:
    """Returns the request's state in each client, on the server that its second call reaches."""
    for _ in range(2):
        states = [client.state(request_id), await asynchronous.state(request_id)]
    return states


async def test_no_call_reaches_a_former_master_that_still_runs(
    tmp_path: Path, asks_each_time: None
) -> None:
    """Open connections close, even after sentinels have forgotten their number of failovers."""
    port = free_port()
    url = as_role("producer", f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    with (
        OwnServer(tmp_path / "former") as former,
        OwnServer(tmp_path / "master") as master,
        naming(tmp_path / "sentinel", port, former, 1),
        redis.Redis(port=port) as watcher,
        Client(master.url) as direct,
    ):
        until(lambda: is_found(watcher))
        request_id = direct.enqueue("a")
        async with AsyncClient(url) as asynchronous:
            with Client(url) as client:
                assert await states_in(client, asynchronous, request_id) == [None] * 2
                watcher.execute_command("SENTINEL REMOVE", SERVICE)
                watcher.execute_command("SENTINEL MONITOR", SERVICE, "127.0.0.1", master.port, 1)
                until(lambda: is_found(watcher))
                assert await states_in(client, asynchronous, request_id) == ["waiting"] * 2


async def test_nobody_believes_a_sentinel_that_missed_a_failover(
    tmp_path: Path, asks_each_time: None
) -> None:
    newest, late = free_port(), free_port()
    addresses = f"127.0.0.1:{newest},127.0.0.1:{late}"
    url = as_role("producer", f"redis+sentinel://{addresses}/{SERVICE}/0")
    with (
        OwnServer(tmp_path / "former") as former,
        OwnServer(tmp_path / "master") as master,
        naming(tmp_path / "late", late, former, 0),
        redis.Redis(port=newest) as watcher,
        Client(master.url) as direct,
    ):
        request_id = direct.enqueue("a")
        with ExitStack() as newest_sentinel:
            newest_sentinel.enter_context(naming(tmp_path / "newest", newest, master, 1))
            until(lambda: is_found(watcher))
            async with AsyncClient(url) as asynchronous:
                with Client(url) as client:
                    assert await states_in(client, asynchronous, request_id) == ["waiting"] * 2
                    newest_sentinel.close()
                    assert await states_in(client, asynchronous, request_id) == ["waiting"] * 2


async def test_nobody_believes_the_leader_of_a_failover_until_its_end(
    tmp_path: Path, asks_each_time: None
) -> None:
    """The sentinel names the former master until all replicas follow the new one. Here, one replica
    hangs."""
    with ExitStack() as running, OwnServer(tmp_path / "former") as former:
        of_former = ("--replicaof", f"127.0.0.1 {former.port}")
        master = running.enter_context(OwnServer(tmp_path / "master", *of_former))
        never = ("--replica-priority", "0")  # Sentinel never makes it the master
        hangs = running.enter_context(OwnServer(tmp_path / "hangs", *of_former, *never))
        with former.client() as client:
            until(lambda: client.info("replication")["connected_slaves"] == 2)
        ports = free_ports(2)  # only now, as another test's server may take a free port
        for port in ports:
            running.enter_context(naming(tmp_path / f"{port}", port, former, 0))
        leader, another = (running.enter_context(redis.Redis(port=port)) for port in ports)
        until(lambda: all(map(knows_both, (leader, another))))
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        url = as_role("producer", f"redis+sentinel://{addresses}/{SERVICE}/0")
        with Client(url) as client, Client(master.url) as direct:
            async with AsyncClient(url) as asynchronous:
                assert await states_in(client, asynchronous, "a") == [None] * 2
                hangs.freeze()
                leader.execute_command("SENTINEL FAILOVER", SERVICE)
                until(lambda: of_master(another)["port"] == str(master.port))
                request_id = direct.enqueue("a")
                assert await states_in(client, asynchronous, request_id) == ["waiting"] * 2


def knows_both(watcher: redis.Redis) -> bool:
    """Whether a sentinel knows two replicas and another sentinel."""
    if not is_found(watcher):
        return False
    known = of_master(watcher)
    return (known["num-slaves"], known["num-other-sentinels"]) == ("2", "1")


async def check_both_clients(url: str) -> None:
    """Each client sees the requests that the other enqueues."""
    with Client(url) as client:
        request_id = client.enqueue("a")
        async with AsyncClient(url) as asynchronous:
            assert await asynchronous.state(request_id) == "waiting"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sentinel_that_says_nothing_is_asked_once_and_then_the_next(
    tmp_path: Path, kind: str
) -> None:
    port, folder = free_port(), tmp_path / "sentinel"
    network = Network(port)
    network.hold()
    with OwnServer(tmp_path / "master") as master, redis.Redis(port=port) as watcher:
        text = ALONE.format(folder=folder, service=SERVICE, master=master.port)
        with sentinel(folder, f"port {port}\n{text}"):
            until(lambda: is_found(watcher))
            addresses = f"127.0.0.1:{network.port},127.0.0.1:{port}"
            url = f"redis+sentinel://{addresses}/{SERVICE}/0?socket_timeout=2"
            if kind == "sync":
                open_redis(url).close()
            else:
                await (await open_async_redis(url)).aclose()
            assert network.num_accepted == 1
    network.close()


async def test_sentinels_with_a_separate_password(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "sentinel"
    users = f"port {port}\nuser default off\nuser watcher on >their-secret ~* &* +@all\n"
    url = as_role("producer", f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    with OwnServer(tmp_path / "master") as master:
        text = users + ALONE.format(folder=folder, service=SERVICE, master=master.port)
        with (
            sentinel(folder, text),
            redis.Redis(port=port, username="watcher", password="their-secret") as watcher,
        ):
            until(lambda: is_found(watcher))
            known = f"{url}?sentinel_username=watcher&sentinel_password=their-secret"
            await check_both_clients(known)
            wrong = known.replace("=watcher", "=nobody")
            with pytest.raises(RedisUnavailableError, match=r"its credentials[^<]*$"):
                Client(wrong)
            with pytest.raises(RedisUnavailableError, match=r"its credentials[^<]*$") as raised:
                await open_async_redis(wrong)
            assert "their-secret" not in str(raised.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
@pytest.mark.skipif(shutil.which("redis-server") is None, reason=NO_TLS)
async def test_sentinels_and_server_speak_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    port, at_master, folder = free_port(), free_port(), tmp_path / "sentinel"
    options = [
        it
        for name, value in tls_settings(tmp_path, at_master).items()
        for it in (f"--{name}", value)
    ]
    text = "port 0\ntls-replication yes\n"
    text += "".join(f"{name} {value}\n" for name, value in tls_settings(tmp_path, port).items())
    text += ALONE.format(folder=folder, service=SERVICE, master=at_master)
    authority = f"ssl_ca_certs={tmp_path / 'ca.crt'}"
    url = as_role("producer", f"rediss+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    with (
        OwnServer(tmp_path / "master", *options),
        sentinel(folder, text),
        redis.Redis.from_url(f"rediss://127.0.0.1:{port}?{authority}") as watcher,
    ):
        until(lambda: is_found(watcher))
        await check_both_clients(f"{url}?{authority}")
        with pytest.raises(RedisUnavailableError, match="refuses the connection"):
            Client(url)  # which does not know who vouches for them
