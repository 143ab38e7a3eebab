"""A failover under Sentinel, under load: streams go on, or end with a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from promptq.producer import AsyncClient, Client
from promptq.shared.errors import ConfigurationError, RedisUnavailableError
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.server.connection import open_async_redis, open_redis
from tests.certificates import make_certificates, tls_settings
from tests.helpers import text_of
from tests.integration.faults import (
    Network,
    OwnServer,
    check_log,
    check_that_answers_are_ones_own,
    free_port,
    num_tokens,
    put,
    result_of,
    server_program,
    started,
    until,
)
from tests.integration.reading import KINDS
from tests.roles import as_role

FAULTY = "tests.integration.faulty_worker"
SERVICE = "promptq"
CONFIG = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {service} 127.0.0.1 {master} 2
sentinel down-after-milliseconds {service} 600000
sentinel failover-timeout {service} 3000
"""


@contextmanager
def sentinel(folder: Path, text: str) -> Iterator[None]:
    """One with this configuration."""
    folder.mkdir()
    config = folder / "sentinel.conf"
    config.write_text(text)
    command = [server_program(), str(config), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass
class Guarded:
    """A master and its replica, watched by three sentinels."""

    master: OwnServer
    replica: OwnServer
    ports: list[int]

    @property
    def url(self) -> str:
        addresses = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return as_role("producer", f"redis+sentinel://{addresses}/{SERVICE}/0")

    def lose_writes(self) -> None:
        """From now on the replica gets nothing."""
        with self.master.client() as master, self.replica.client() as replica:
            replica.config_set("masteruser", "nobody")
            replica.config_set("masterauth", "wrong")
            master.client_kill_filter(_type="replica")
            until(lambda: replica.info("replication")["master_link_status"] == "down")

    def kill_master(self) -> None:
        """Sentinels would take a master for dead that a busy machine lets wait, so they look for
        its death only now."""
        for port in self.ports:
            with redis.Redis(port=port) as sentinel:
                sentinel.sentinel_set(SERVICE, "down-after-milliseconds", 700)
        self.master.kill()

    def fail_over(self) -> None:
        """Kill the master, and say so: what has long heard nothing of its master, as after
        `lose_writes` on a busy machine, sentinels promote only if they are told to."""
        self.master.kill()
        with redis.Redis(port=self.ports[0]) as sentinel:
            while self.replica_role() != "master":
                with contextlib.suppress(redis.ResponseError):  # it is at it, or not ready yet
                    sentinel.execute_command("SENTINEL FAILOVER", SERVICE)
                time.sleep(0.1)

    def replica_role(self) -> str:
        with self.replica.client() as client:
            return str(client.info("replication")["role"])


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with (
        OwnServer(tmp_path / "master") as master,
        OwnServer(tmp_path / "replica", "--replicaof", f"127.0.0.1 {master.port}") as replica,
    ):
        with replica.client() as client:
            until(lambda: client.info("replication")["master_link_status"] == "up")
        guarded = Guarded(master, replica, [free_port() for _ in range(3)])
        with ExitStack() as running:
            for port in guarded.ports:
                folder = tmp_path / f"sentinel-{port}"
                text = CONFIG.format(port=port, folder=folder, service=SERVICE, master=master.port)
                running.enter_context(sentinel(folder, text))
            until(lambda: knows_all(guarded))
            yield guarded


def knows_all(guarded: Guarded) -> bool:
    for port in guarded.ports:
        try:
            with redis.Redis(port=port) as client:
                told = client.sentinel_master(SERVICE)
        except redis.RedisError:
            return False
        if (told["num-slaves"], told["num-other-sentinels"]) != (1, 2):
            return False
    return True


LEASE = ("--lease-ms", "20000")
"""None runs out while a failover takes place, on a slow machine neither; workers reap meanwhile."""
LENGTH = 800
SLOWLY = {"STEP_SECONDS": "0.01"}
"""Streams of this length are still running when the master is lost, wherever the machine stalls."""


def num_crashes(queue: RequestQueue, request_id: str) -> int:
    return int(queue.run(lookups.record(queue.keys, request_id)).get("crashes", 0))


async def test_streams_outlive_a_failover(guarded: Guarded, tmp_path: Path) -> None:
    """And nobody counts it as a fault of what runs."""
    with (
        started(tmp_path, guarded.url, *LEASE, module=FAULTY) as one,
        started(tmp_path, guarded.url, *LEASE, module=FAULTY) as two,
    ):
        async with AsyncClient(guarded.url) as client:
            ids = [await client.enqueue("a", seed=n, max_tokens=1500) for n in range(16)]
            reading = [asyncio.create_task(client.result(request_id)) for request_id in ids]
            with guarded.master.client() as own:
                queue = RequestQueue(own)
                while not all(num_tokens(queue, request_id) > 50 for request_id in ids):
                    await asyncio.sleep(0.01)
            guarded.kill_master()
            for n, result in enumerate(await asyncio.gather(*reading)):
                assert result.text == text_of(n, 1500)
        assert guarded.replica_role() == "master"
        with guarded.replica.client() as own:
            queue = RequestQueue(own)
            for n, request_id in enumerate(ids):
                check_log(queue, request_id, text_of(n, 1500))
                assert num_crashes(queue, request_id) == 0
        for worker in (one, two):
            worker.terminate()
            assert worker.wait() == 0


def test_a_failover_that_loses_writes_loses_no_stream(guarded: Guarded, tmp_path: Path) -> None:
    """The worker sends again what the new master has not got; its reader sees no seam."""
    with (
        started(tmp_path, guarded.url, *LEASE, module=FAULTY, **SLOWLY) as worker,
        Client(guarded.url) as client,
        guarded.master.client() as own,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=LENGTH)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(100))
        guarded.lose_writes()
        text += "".join(next(stream).text for _ in range(200))
        with guarded.replica.client() as replica:
            kept = num_tokens(RequestQueue(replica), request_id)
            assert 0 < kept < num_tokens(RequestQueue(own), request_id)
            guarded.fail_over()
            text += "".join(event.text for event in stream)
            assert text == text_of(1, LENGTH)
            log = check_log(RequestQueue(replica), request_id, text)
            assert {event["attempt"] for event in log} == {1}
            assert num_crashes(RequestQueue(replica), request_id) == 0
        assert worker.logged("the log lost events; sending them again")


def test_a_claim_that_a_failover_lost_is_made_anew(guarded: Guarded, tmp_path: Path) -> None:
    """What its worker sends is fenced off then, and the new attempt gives the same tokens, also to
    a request that brings no seed.
    """
    with guarded.master.client() as own, guarded.replica.client() as replica:
        before, after = RequestQueue(own), RequestQueue(replica)
        ids = [put(before, seed=1, max_tokens=LENGTH), put(before, max_tokens=LENGTH)]
        until(lambda: after.count() == len(ids))
        guarded.lose_writes()
        with (
            started(tmp_path, guarded.url, "--lease-ms", "2000", module=FAULTY, **SLOWLY) as worker,
            Client(as_role("subscriber", guarded.url)) as client,
        ):
            streams = [client.stream(request_id) for request_id in ids]
            begun = ["".join(next(stream).text for _ in range(100)) for stream in streams]
            given = int(before.run(lookups.record(before.keys, ids[1]))["seed"])
            guarded.fail_over()
            for request_id, seed, stream, text in zip(ids, (1, given), streams, begun, strict=True):
                text += "".join(event.text for event in stream)
                assert text == text_of(seed, LENGTH)
                assert result_of(after, request_id)["text"] == text
            until(lambda: worker.logged("lease lost"))


def test_a_url_of_sentinels_says_what_is_wrong(guarded: Guarded) -> None:
    for url in ("redis+sentinel://host", "redis+sentinel:///service", "redis+sentinel://h:x/s"):
        with pytest.raises(ConfigurationError, match="is not a Redis URL"):
            open_redis(url)
    with pytest.raises(RedisUnavailableError, match="No master found for 'another'"):
        open_redis(guarded.url.replace(SERVICE, "another"))


async def test_nobody_gets_an_answer_to_somebody_else(guarded: Guarded) -> None:
    await check_that_answers_are_ones_own(guarded.url)


ALONE = """
bind 127.0.0.1
dir {folder}
sentinel monitor {service} 127.0.0.1 {master} 1
"""


async def check_both_clients(url: str) -> None:
    """What one puts into the queue the other sees."""
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
            url = f"redis+sentinel://{addresses}/{SERVICE}/0?socket_timeout=0.3"
            if kind == "sync":
                open_redis(url).close()
            else:
                await (await open_async_redis(url)).aclose()
            assert network.num_accepted == 1
    network.close()


async def test_sentinels_with_a_password_of_their_own(tmp_path: Path) -> None:
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
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server speaks TLS")
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
        with pytest.raises(RedisUnavailableError, match="takes the connection"):
            Client(url)  # which does not know who vouches for them


def is_found(watcher: redis.Redis) -> bool:
    """Whether the sentinel answers and takes its master for alive."""
    try:
        return str(watcher.sentinel_master(SERVICE)["flags"]) == "master"
    except redis.ConnectionError:
        return False
