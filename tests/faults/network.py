"""What tests break between a program and its server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import redis

from promptq.shared.server.connection import open_async_redis, open_redis
from tests.support.roles import as_role


class Network:
    """A TCP proxy to a server. It cuts connections, holds them, loses what is sent, or a reply."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = as_role("producer", f"redis://127.0.0.1:{self.port}/0")
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_up = True
        self._flows = threading.Event()
        self._flows.set()
        self._loses = False
        self._swallow: Callable[[bytes], bool] | None = None
        self.num_swallowed = 0
        self.num_accepted = 0
        self.num_turned_away = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, port: int) -> None:
        """Take new connections to another server, and leave the old ones where they are."""
        self._target = port

    def cut(self) -> None:
        """Drop all connections and take no new ones."""
        self._is_up = False
        self._drop_all()

    def mend(self) -> None:
        self._is_up = True
        self._loses = False
        self._flows.set()

    def hold(self) -> None:
        """Keep connections open and let nothing pass until it is mended."""
        self._flows.clear()

    def lose(self) -> None:
        """Keep connections open and lose what is sent; one that lost something loses all it gets.

        As behind a router that has forgotten the connection.
        """
        self._loses = True

    def swallow_reply_to(self, command: Callable[[bytes], bool]) -> None:
        """Drop the next connection that sends such a command, once the server has done it."""
        self._swallow = command

    def close(self) -> None:
        self._is_up = False
        self._flows.set()
        self._listener.close()
        self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                self.num_turned_away += 1
                client.close()
                continue
            if not self._is_up:
                self.num_turned_away += 1
                client.close()
                server.close()
                continue
            swallowing, lost = threading.Event(), threading.Event()
            with self._lock:
                self._open |= {client, server}
            self.num_accepted += 1
            for source, sink, is_request in ((client, server, True), (server, client, False)):
                arguments = (source, sink, is_request, swallowing, lost)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        is_request: bool,
        swallowing: threading.Event,
        lost: threading.Event,
    ) -> None:
        try:
            while data := source.recv(65536):
                self._flows.wait()
                if self._loses:
                    lost.set()
                if lost.is_set():
                    continue
                if is_request and self._swallow is not None and self._swallow(data):
                    self._swallow = None
                    swallowing.set()
                elif not is_request and swallowing.is_set():
                    self.num_swallowed += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {source, sink}
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            source.close()


async def check_that_answers_are_ones_own(url: str) -> None:
    """A connection on which an answer waits is used no more: all after that came one late."""
    client = open_redis(url)
    # Up to redis-py 5.2 a pool is told for which command, and asyncio's has another name for that
    # which looks whether something came.
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
