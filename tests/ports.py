"""Ports for servers that are told theirs."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port of this machine that nobody listens on.

    It is none of those that the system gives to connections and to whoever asks for any port, as
    one of these may be taken before the test's server has started.
    """
    [port] = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """So many of them, each another."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
