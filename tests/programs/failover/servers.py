"""Redis servers on machines of an isolated network: one alone, under Sentinel, or in a Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import text_map
from tests.programs.failover.isolation import NEAR, Machine, NetworkMachine
from tests.support.preload import compile_preload
from tests.support.roles import acl_file_for_tests, as_role, password_of
from tests.support.servers import answers
from tests.support.waiting import until

PORT, SENTINEL_PORT = 6379, 26379
NUM_SLOTS = 16384
SERVICE = "promptq"
_NOTICE_MS = 1000
"""After this time without an answer, a server counts as gone."""
_SENTINEL = f"""
port {SENTINEL_PORT}
bind {{own}}
bind-source-addr {{own}}
sentinel announce-ip {{own}}
protected-mode no
sentinel monitor {SERVICE} {{primary}} {PORT} 2
sentinel down-after-milliseconds {SERVICE} {_NOTICE_MS}
sentinel failover-timeout {SERVICE} 4000
"""


Server = Sequence[str | Path]
"""A command that starts a server, without its port and folder."""


class Node:
    """A server on a machine. The append-only file remains when the server dies."""

    def __init__(self, machine: Machine, folder: Path, command: Server) -> None:
        folder.mkdir()
        self.machine, self._folder = machine, folder
        self._command = [*command, "--port", str(PORT), "--protected-mode", "no", "--save", ""]
        self._command += ["--dir", folder, "--repl-diskless-sync-delay", "0"]
        self._command += ["--bind", machine.address, "--bind-source-addr", machine.address]
        users = acl_file_for_tests(folder)
        with users.open("a") as file:
            file.write(f"user {NEAR} on >{password_of(NEAR)} ~* &* +@all\n")
        self._command += ["--aclfile", users]
        self.client: Any = redis.Redis(host=machine.address, port=PORT, socket_timeout=10)
        self.start()

    def start(self) -> None:
        library = compile_preload(Path(__file__).with_name("synced.c"), self._folder.parent)
        preloaded = {"LD_PRELOAD": str(library), "SYNCED": str(self._note)}
        self._process = self.machine.start(self._command, self._folder / "log", **preloaded)
        until(lambda: answers(self.client))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def cut_power(self) -> None:
        """Kill the server, and delete the data that is not yet on the disk."""
        self.kill()
        synced = int(self._note.read_text()) if self._note.exists() else 0
        for log in self._folder.glob("appendonlydir/*.incr.aof"):
            with log.open("r+b") as file:
                file.truncate(min(synced, log.stat().st_size))

    def unplug(self) -> None:
        """Cut off the node, and the other programs on its machine, from all other machines."""
        if isinstance(self.machine, NetworkMachine):
            self.machine.unplug()
            return
        with self._near_client() as client:
            client.execute_command("ACL", "SETUSER", "default", "off")
            client.execute_command("CLIENT", "KILL", "USER", "default")

    def plug_in(self) -> None:
        if isinstance(self.machine, NetworkMachine):
            self.machine.plug_in()
            return
        with self._near_client() as client:
            client.execute_command("ACL", "SETUSER", "default", "on")

    def _near_client(self) -> Any:
        login = {"username": NEAR, "password": password_of(NEAR)}
        return redis.Redis(host=self.machine.address, port=PORT, **login)

    def replicates(self) -> bool:
        """Whether the node is a replica that gets its primary's writes."""
        info = self.client.info("replication")
        return info["role"] == "slave" and info["master_link_status"] == "up"

    @property
    def is_primary(self) -> bool:
        return str(self.client.info("replication")["role"]) == "master"

    @property
    def _note(self) -> Path:
        return self._folder / "synced"


@dataclass
class Servers:
    """The nodes that have the queue: its primary, then the replicas. `url` leads to the primary."""

    nodes: list[Node]
    url: str

    @property
    def replaced(self) -> Node | None:
        """The node that took the place of the first primary; None before a failover."""
        return next((node for node in self.nodes[1:] if node.is_primary), None)

    def settle(self) -> None:
        """Wait until all nodes but the primary replicate the primary."""
        until(lambda: sum(node.replicates() for node in self.nodes) == len(self.nodes) - 1)


def alone(machines: Sequence[Machine], folder: Path, server: Server, num_replicas: int) -> Servers:
    """Returns one server without replicas."""
    node = Node(machines[0], folder / "alone", server)
    return Servers([node], as_role("", f"redis://{machines[0].address}:{PORT}/0"))


def sentinel(
    machines: Sequence[Machine], folder: Path, server: Server, num_replicas: int
) -> Servers:
    """Returns a primary, its replicas, and three sentinels, each on another machine."""
    primary = machines[0].address
    nodes = [Node(machines[0], folder / "primary", server)]
    for number, machine in enumerate(machines[1 : num_replicas + 1]):
        command = [*server, "--replicaof", f"{primary} {PORT}"]
        nodes.append(Node(machine, folder / f"replica{number}", command))
    servers = Servers(nodes, "")
    servers.settle()
    for number, machine in enumerate(machines[:3]):
        config = folder / f"sentinel{number}.conf"
        config.write_text(_SENTINEL.format(primary=primary, own=machine.address))
        machine.start([server[0], config, "--sentinel"], config.with_suffix(".log"))
    addresses = [f"{machine.address}:{SENTINEL_PORT}" for machine in machines[:3]]
    until(lambda: all(_knows_all(machine, num_replicas) for machine in machines[:3]))
    servers.url = as_role("", f"redis+sentinel://{','.join(addresses)}/{SERVICE}/0")
    return servers


def cluster(
    machines: Sequence[Machine], folder: Path, server: Server, num_replicas: int
) -> Servers:
    """Returns a cluster of three primaries. Only the primary of the queue's slot has replicas."""
    command = [*server, "--cluster-enabled", "yes", "--cluster-node-timeout", str(_NOTICE_MS)]
    command += ["--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"]
    nodes = [
        Node(machine, folder / f"node{number}", command)
        for number, machine in enumerate(machines[: 3 + num_replicas])
    ]
    slot = key_slot(Keys("default").pending.encode())
    ranges = [(0, slot), (slot + 1, slot + 1), (slot + 2, NUM_SLOTS - 1)]
    for node, (first, last) in zip(nodes, ranges, strict=False):
        node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
    for number, node in enumerate(nodes):
        node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        nodes[0].client.execute_command("CLUSTER", "MEET", node.machine.address, PORT)
    until(lambda: all(_is_joined(node, len(nodes)) for node in nodes))
    primary_id = nodes[0].client.execute_command("CLUSTER MYID")
    for node in nodes[3:]:
        node.client.execute_command("CLUSTER", "REPLICATE", primary_id)
    addresses = ",".join(f"{node.machine.address}:{PORT}" for node in nodes)
    servers = Servers([nodes[0], *nodes[3:]], as_role("", f"redis+cluster://{addresses}"))
    servers.settle()
    return servers


def _knows_all(machine: Machine, num_replicas: int) -> bool:
    with redis.Redis(host=machine.address, port=SENTINEL_PORT) as client:
        if not answers(client):
            return False
        record = text_map(client.execute_command("SENTINEL", "MASTER", SERVICE))
    return (record["num-slaves"], record["num-other-sentinels"]) == (str(num_replicas), "2")


def _is_joined(node: Node, num_nodes: int) -> bool:
    info = node.client.execute_command("CLUSTER INFO")
    is_known = int(info["cluster_known_nodes"]) == num_nodes
    return is_known and info["cluster_state"] == "ok"
