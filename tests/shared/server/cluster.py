"""A Redis Cluster of three primaries on this machine, without replicas."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import redis

from tests.processes import start
from tests.roles import acl_file_for_tests
from tests.servers import answers, free_ports

NUM_SLOTS = 16384


class Cluster:
    """Starts with `binary` (redis-server or valkey-server) and the roles; ends with its context."""

    def __init__(self, binary: str, num_nodes: int = 3) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="promptq-cluster-")
        free = free_ports(2 * num_nodes)
        self.ports, bus_ports = free[:num_nodes], free[num_nodes:]
        folder = Path(self._folder.name)
        acl_file = acl_file_for_tests(folder)
        self._nodes = [
            _start_node(binary, folder, acl_file, *ports)
            for ports in zip(self.ports, bus_ports, strict=True)
        ]
        self.clients: list[Any] = [redis.Redis(port=port) for port in self.ports]
        for node, client in zip(self._nodes, self.clients, strict=True):
            _wait_for(client, node)
        self._join(bus_ports)

    def owner(self, key: str) -> int:
        """The number of the node that has the key's slot."""
        return self.slot(key) * len(self.ports) // NUM_SLOTS

    def slot(self, key: str) -> int:
        slot: int = self.clients[0].cluster("KEYSLOT", key)
        return slot

    def url(self, number: int) -> str:
        return f"redis://127.0.0.1:{self.ports[number]}/0"

    def keys(self) -> list[str]:
        """All keys of all nodes."""
        return [key.decode() for client in self.clients for key in client.scan_iter()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client, node in zip(self.clients, self._nodes, strict=True):
            client.close()
            node.kill()
            node.wait()
        self._folder.cleanup()

    def _join(self, bus_ports: list[int]) -> None:
        slots = [slot * len(self.ports) // NUM_SLOTS for slot in range(NUM_SLOTS)]
        for number, client in enumerate(self.clients):
            first, count = slots.index(number), slots.count(number)
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, first + count - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for port, bus_port in zip(self.ports, bus_ports, strict=True):
            self.clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port, bus_port)
        for client in self.clients:
            while True:
                info = client.execute_command("CLUSTER INFO")
                is_whole = str(info["cluster_known_nodes"]) == str(len(self.ports))
                if is_whole and info["cluster_state"] == "ok":
                    break
                time.sleep(0.02)


def _start_node(
    binary: str, folder: Path, acl_file: Path, port: int, bus_port: int
) -> subprocess.Popen[bytes]:
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
    command += ["--cluster-config-file", f"nodes-{port}.conf", "--dir", str(folder)]
    command += ["--aclfile", str(acl_file)]
    return start(*command, stdout=subprocess.DEVNULL)


def _wait_for(client: Any, node: subprocess.Popen[bytes]) -> None:
    while not answers(client):
        if node.poll() is not None:
            raise RuntimeError("a node of the cluster did not start")
        time.sleep(0.01)
