"""A Redis Cluster of three primaries on this machine, each with a replica if a test wants them."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import redis

from tests.support.processes import start
from tests.support.roles import acl_file_for_tests
from tests.support.servers import answers, free_ports
from tests.support.waiting import until

NUM_SLOTS = 16384
_PAUSE_MS = 120_000
"""Longer than a replica is late when the machine stands still."""
_MIGRATE_MS = 60_000
"""A node that waits no longer for another leaves keys on both."""


class Node:
    """One server of a cluster, which may be killed and started again."""

    def __init__(
        self, binary: str, folder: Path, acl_file: Path, timeout_ms: int, port: int, bus_port: int
    ) -> None:
        self.port, self.bus_port = port, bus_port
        self._command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
        self._command += ["--cluster-config-file", f"nodes-{port}.conf", "--dir", str(folder)]
        self._command += ["--cluster-node-timeout", str(timeout_ms)]
        self._command += ["--repl-diskless-sync-delay", "0", "--aclfile", str(acl_file)]
        self._command += ["--cluster-require-full-coverage", "no"]
        self._log = folder / f"node-{port}.log"
        self._command += ["--logfile", str(self._log)]
        self.client: Any = redis.Redis(port=port, socket_timeout=2 * _MIGRATE_MS / 1000)
        self.start()

    def start(self) -> None:
        self.process = start(*self._command, stdout=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it answers."""
        until(lambda: answers(self.client) or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise RuntimeError("a node of the cluster did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGCONT)
        self.kill()

    @property
    def id(self) -> str:
        return str(self.client.execute_command("CLUSTER MYID").decode())

    @property
    def role(self) -> str:
        return str(self.client.info("replication")["role"])

    @property
    def num_elections(self) -> int:
        """How often it took the place of its primary."""
        return self._log.read_text(errors="replace").count("Failover election won")

    def is_in_step(self) -> bool:
        """Whether it is a replica that gets what its primary writes."""
        told = self.client.info("replication")
        return told["role"] == "slave" and told["master_link_status"] == "up"

    def kill_once_copied(self, replica: Node) -> None:
        """Kill it once the replica has all that it accepted. It accepts no more meanwhile.

        `WAIT` would not do: it waits for what the same connection has written.
        """
        self.client.execute_command("CLIENT", "PAUSE", _PAUSE_MS, "WRITE")
        written = self.client.info("replication")["master_repl_offset"]
        until(lambda: replica.client.info("replication")["slave_repl_offset"] >= written)
        self.kill()


class Cluster:
    """Starts with `binary` (redis-server or valkey-server) and the roles; ends with its context."""

    def __init__(
        self,
        binary: str,
        num_nodes: int = 3,
        *,
        with_replicas: bool = False,
        node_timeout_ms: int = 500,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="promptq-cluster-")
        num_all = 2 * num_nodes if with_replicas else num_nodes
        free = free_ports(2 * num_all)
        folder = Path(self._folder.name)
        acl_file = acl_file_for_tests(folder)
        self.nodes = [
            Node(binary, folder, acl_file, node_timeout_ms, *ports)
            for ports in zip(free[:num_all], free[num_all:], strict=True)
        ]
        for node in self.nodes:
            node.wait()
        self.ports = [node.port for node in self.nodes[:num_nodes]]
        self.clients: list[Any] = [node.client for node in self.nodes[:num_nodes]]
        self._join(num_nodes)

    def owner(self, key: str) -> int:
        """The number of the node that has the key's slot, unless that was moved."""
        return self.slot(key) * len(self.ports) // NUM_SLOTS

    def slot(self, key: str) -> int:
        slot: int = self._alive().client.cluster("KEYSLOT", key)
        return slot

    def url(self, number: int) -> str:
        """Of one node alone."""
        return f"redis://127.0.0.1:{self.ports[number]}/0"

    @property
    def cluster_url(self) -> str:
        nodes = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{nodes}"

    def num_clients(self) -> int:
        """How many programs' connections its nodes have, but for those of other nodes."""
        found = [it for node in self.nodes for it in node.client.client_list(_type="normal")]
        return len(found)

    def keys(self) -> list[str]:
        """All keys of all nodes."""
        return [key.decode() for client in self.clients for key in client.scan_iter()]

    def primary_of(self, key: str) -> Node:
        """The node that all others take for the owner of the key's slot now."""
        slot = self.slot(key)
        until(lambda: len(self._owners(slot)) == 1)
        [port] = self._owners(slot)
        return next(node for node in self.nodes if node.port == port)

    def _owners(self, slot: int) -> set[int]:
        """The ports of those that any node that lives takes for the owner of a slot."""
        return {_owner(node.client, slot) for node in self.nodes if node.process.poll() is None}

    def replica_of(self, primary: Node) -> Node:
        """The replica of a node, once it gets what that writes. Without it, nobody could be
        promoted."""
        primary_id = primary.id
        while True:
            for node in self.nodes:
                is_alive = node is not primary and node.process.poll() is None
                if is_alive and _follows(node.client, primary_id):
                    until(node.is_in_step)
                    return node

    def fail_over(self, key: str) -> tuple[Node, Node]:
        """Kill the primary of a key's slot. Returns it, and its replica, which is now primary."""
        primary = self.primary_of(key)
        replica = self.replica_of(primary)
        primary.kill_once_copied(replica)
        until(lambda: self._owners(self.slot(key)) == {replica.port})
        return primary, replica

    @contextmanager
    def frozen_primary(self, key: str) -> Iterator[None]:
        """The primary of a key's slot stands still, and its replica has taken its place."""
        primary = self.primary_of(key)
        replica = self.replica_of(primary)
        primary.process.send_signal(signal.SIGSTOP)
        until(lambda: replica.role == "master")
        yield
        primary.process.send_signal(signal.SIGCONT)
        until(primary.is_in_step)

    def move(self, key: str, *, at_once: bool) -> Node:
        """Move the slot of a key to another primary, key by key or at once. Returns that one."""
        slot, source = self.slot(key), self.primary_of(key)
        if at_once:
            target = self._other_primary(source)
            moving = ("CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
            source.client.execute_command(*moving)
        else:
            with self.moving(key) as (_, target):
                pass
        until(lambda: self._owners(slot) == {target.port})
        return target

    @contextmanager
    def moving(self, key: str) -> Iterator[tuple[Node, Node]]:
        """The slot of a key is between two nodes: where it is, and where it will be at the end."""
        slot, source = self.slot(key), self.primary_of(key)
        target = self._other_primary(source)
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        yield source, target
        while keys := self.keys_in(source, slot):
            migrate(source, target, keys)
        for node in (target, source, *self.primaries()):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target.id)

    def keys_in(self, node: Node, slot: int) -> list[str]:
        """Some of the keys that a node has in a slot."""
        return list(node.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 20))

    def primaries(self) -> list[Node]:
        return [it for it in self.nodes if it.process.poll() is None and it.role == "master"]

    def _other_primary(self, than: Node) -> Node:
        return next(it for it in self.primaries() if it is not than)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self._folder.cleanup()

    def _alive(self) -> Node:
        return next(node for node in self.nodes if node.process.poll() is None)

    def _join(self, num_primaries: int) -> None:
        primaries, replicas = self.nodes[:num_primaries], self.nodes[num_primaries:]
        slots = [slot * num_primaries // NUM_SLOTS for slot in range(NUM_SLOTS)]
        for number, node in enumerate(self.nodes):
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number < num_primaries:
                first, count = slots.index(number), slots.count(number)
                node.client.execute_command("CLUSTER ADDSLOTSRANGE", first, first + count - 1)
            meet = ("CLUSTER MEET", "127.0.0.1", node.port, node.bus_port)
            self.nodes[0].client.execute_command(*meet)
        until(lambda: all(map(self._knows_all, self.nodes)))
        for primary, replica in zip(primaries, replicas, strict=False):
            replica.client.execute_command("CLUSTER REPLICATE", primary.id)
        for replica in replicas:
            until(replica.is_in_step)

    def _knows_all(self, node: Node) -> bool:
        info = node.client.execute_command("CLUSTER INFO")
        is_whole = str(info["cluster_known_nodes"]) == str(len(self.nodes))
        return is_whole and info["cluster_state"] == "ok"


def migrate(source: Node, target: Node, keys: Sequence[str]) -> None:
    to = ("MIGRATE", "127.0.0.1", target.port, "", 0, _MIGRATE_MS, "KEYS", *keys)
    source.client.execute_command(*to)


def _owner(client: Any, slot: int) -> int:
    """The port of the node that owns a slot, as this one tells."""
    for first, last, primary, *_ in client.execute_command("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return int(primary[1])
    return 0


def _follows(client: Any, primary_id: str) -> bool:
    told = client.execute_command("CLUSTER", "NODES").decode()
    return any("myself,slave" in line and primary_id in line for line in told.splitlines())
