"""Sentinels, and a master and a replica that they watch."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from promptq.shared.queue.call import text_map
from tests.support.processes import running
from tests.support.roles import as_role
from tests.support.servers import OwnServer, free_port, server_program
from tests.support.waiting import until

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
    with running(*command, stdout=subprocess.DEVNULL):
        yield


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


@contextmanager
def guarded_by_three(tmp_path: Path) -> Iterator[Guarded]:
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
                told = of_master(client)
        except redis.RedisError:
            return False
        if (told["num-slaves"], told["num-other-sentinels"]) != ("1", "2"):
            return False
    return True


def of_master(client: redis.Redis) -> dict[str, str]:
    """Returns a sentinel's record of the master; some versions of redis-py cannot read it."""
    return text_map(client.execute_command("SENTINEL", "MASTER", SERVICE))


def is_found(watcher: redis.Redis) -> bool:
    """Whether the sentinel answers and takes its master for alive."""
    try:
        return of_master(watcher)["flags"] == "master"
    except redis.ConnectionError:
        return False


ALONE = """
bind 127.0.0.1
dir {folder}
sentinel monitor {service} 127.0.0.1 {master} 1
"""
