"""A TCP proxy in front of the server, with a port for each role, that can spoil the way.

It cuts connections, makes a role's link slow or lets it stall, and swallows replies: the command
gets through, its answer does not, and the connection is cut.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from enum import StrEnum

_CHUNK = 65536
_LOOK_SECONDS = 0.01


class Role(StrEnum):
    """Whose connections a port is for."""

    WORKERS = "workers"
    PRODUCERS = "producers"
    SUBSCRIBERS = "subscribers"


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._writers = writers
        self.is_armed = False
        """The next command's reply is to be swallowed."""
        self.swallows = False

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class _Road:
    """The way of one role."""

    def __init__(self) -> None:
        self.links: set[_Link] = set()
        self.delay_seconds = 0.0
        self.is_open = asyncio.Event()
        self.is_open.set()


class Proxy:
    """Listens on a port for each role and passes on to the server's. Belongs to one event loop."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._roads = {role: _Road() for role in Role}
        self._listeners: dict[Role, asyncio.Server] = {}
        self.num_swallowed = 0
        """Replies that were in fact swallowed: only a link that sends a command has one."""

    async def start(self) -> None:
        for role in Role:
            road = self._roads[role]

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, road: _Road = road
            ) -> None:
                await self._accept(road, reader, writer)

            self._listeners[role] = await asyncio.start_server(accept, "127.0.0.1", 0)

    def url(self, role: Role) -> str:
        """Where the role connects to."""
        port = self._listeners[role].sockets[0].getsockname()[1]
        return f"redis://127.0.0.1:{port}/0"

    async def stop(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        for road in self._roads.values():
            road.is_open.set()
            for link in list(road.links):
                link.cut()
        while any(road.links for road in self._roads.values()):
            await asyncio.sleep(_LOOK_SECONDS)

    def cut(self, role: Role, share: float, rng: random.Random) -> int:
        """Cut about this share of the role's connections; gives how many."""
        links = [link for link in self._roads[role].links if rng.random() < share]
        for link in links:
            link.cut()
        return len(links)

    def swallow(self, role: Role, share: float, rng: random.Random) -> None:
        """Let the next command of this share of the role's connections go unanswered."""
        for link in self._roads[role].links:
            link.is_armed = link.is_armed or rng.random() < share

    async def slow(self, role: Role, delay_seconds: float, seconds: float) -> None:
        """Delay whatever passes, for so long."""
        road = self._roads[role]
        road.delay_seconds = delay_seconds
        await asyncio.sleep(seconds)
        road.delay_seconds = 0.0

    async def stall(self, role: Role, seconds: float) -> None:
        """Let nothing pass for so long; no connection is lost."""
        road = self._roads[role]
        road.is_open.clear()
        await asyncio.sleep(seconds)
        road.is_open.set()

    async def _accept(
        self, road: _Road, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            opened = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:  # the server is down: so the client finds it
            writer.transport.abort()
            return
        link = _Link((writer, opened[1]))
        road.links.add(link)
        try:
            await asyncio.gather(
                self._pump(road, link, reader, opened[1], is_reply=False),
                self._pump(road, link, opened[0], writer, is_reply=True),
            )
        finally:
            road.links.discard(link)
            link.cut()

    async def _pump(
        self,
        road: _Road,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_reply: bool,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await road.is_open.wait()
                if road.delay_seconds:
                    await asyncio.sleep(road.delay_seconds)
                if link.is_armed and not is_reply:
                    link.is_armed, link.swallows = False, True
                elif link.swallows and is_reply:
                    self.num_swallowed += 1
                    break
                writer.write(data)
                await writer.drain()
        link.cut()
