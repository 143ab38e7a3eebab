"""A failover under Sentinel, under load: streams go on, or end with a clear error."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from producer import AsyncClient, Client
from shared import lookups
from shared.connection import open_redis
from shared.errors import ConfigurationError, RedisUnavailableError
from shared.request_queue import RequestQueue
from tests.helpers import text_of
from tests.integration.faults import (
    OwnServer,
    check_log,
    free_port,
    num_tokens,
    put,
    result_of,
    server_program,
    started,
    until,
)
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
        sentinels = []
        for port in guarded.ports:
            folder = tmp_path / f"sentinel-{port}"
            folder.mkdir()
            config = folder / "sentinel.conf"
            text = CONFIG.format(port=port, folder=folder, service=SERVICE, master=master.port)
            config.write_text(text)
            command = [server_program(), str(config), "--sentinel"]
            sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        until(lambda: knows_all(guarded))
        yield guarded
        for sentinel in sentinels:
            sentinel.kill()
            sentinel.wait()


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
        started(tmp_path, guarded.url, *LEASE, module=FAULTY) as worker,
        Client(guarded.url) as client,
        guarded.master.client() as own,
    ):
        request_id = client.enqueue("a", seed=1, max_tokens=1500)
        stream = client.stream(request_id)
        text = "".join(next(stream).text for _ in range(100))
        guarded.lose_writes()
        text += "".join(next(stream).text for _ in range(200))
        written = num_tokens(RequestQueue(own), request_id)
        guarded.kill_master()
        with guarded.replica.client() as replica:
            kept = num_tokens(RequestQueue(replica), request_id)
            assert 0 < kept < written
            text += "".join(event.text for event in stream)
            assert text == text_of(1, 1500)
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
        ids = [put(before, seed=1, max_tokens=1500), put(before, max_tokens=1500)]
        until(lambda: after.count() == len(ids))
        guarded.lose_writes()
        with (
            started(tmp_path, guarded.url, "--lease-ms", "2000", module=FAULTY) as worker,
            Client(as_role("subscriber", guarded.url)) as client,
        ):
            streams = [client.stream(request_id) for request_id in ids]
            begun = ["".join(next(stream).text for _ in range(100)) for stream in streams]
            given = int(before.run(lookups.record(before.keys, ids[1]))["seed"])
            guarded.kill_master()
            for request_id, seed, stream, text in zip(ids, (1, given), streams, begun, strict=True):
                text += "".join(event.text for event in stream)
                assert text == text_of(seed, 1500)
                assert result_of(after, request_id)["text"] == text
            until(lambda: worker.logged("lease lost"))


def test_a_url_of_sentinels_says_what_is_wrong(guarded: Guarded) -> None:
    for url in ("redis+sentinel://host", "redis+sentinel:///service", "redis+sentinel://h:x/s"):
        with pytest.raises(ConfigurationError, match="is not a Redis URL"):
            open_redis(url)
    with pytest.raises(RedisUnavailableError, match="No master found for 'another'"):
        open_redis(guarded.url.replace(SERVICE, "another"))
