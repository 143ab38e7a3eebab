"""A network between programs and their server that tests can break."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import TypeVar

from tests.support.roles import as_role

T = TypeVar("T")
_CHUNK = 65536


class Network:
    """A TCP proxy to a server, which can cut, hold, slow down and lose traffic, or swallow a reply.
    The proxy runs in a separate thread, so a test may block meanwhile."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._links: set[_Link] = set()
        self._is_up = True
        self._flows = asyncio.Event()
        self._flows.set()
        self._loses = False
        self._delay_seconds = 0.0
        self._swallow: Callable[[bytes], bool] | None = None
        self.num_swallowed = 0
        """Number of swallowed replies."""
        self.num_accepted = 0
        self.num_turned_away = 0
        starting = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._listener = asyncio.run_coroutine_threadsafe(starting, _loop()).result()
        self.port: int = self._listener.sockets[0].getsockname()[1]
        self.address = f"redis://127.0.0.1:{self.port}/0"
        self.url = as_role("producer", self.address)

    def lead_to(self, port: int) -> None:
        """Lead new connections to another server. Existing connections do not change."""
        self._target = port

    def cut(self) -> None:
        """Drop all connections and refuse new ones."""
        self._is_up = False
        _do(lambda: self._cut(self._links))

    def cut_some(self, share: float, rng: random.Random) -> int:
        """Drop about this share of the connections (0 to 1), and return their number. New
        connections are accepted."""
        return _do(lambda: self._cut({link for link in self._links if rng.random() < share}))

    def mend(self) -> None:
        """End all faults."""
        self._is_up = True
        self._loses = False
        self._delay_seconds = 0.0
        self.let_flow()

    def hold(self) -> None:
        """Keep connections open and let nothing pass until `let_flow` or `mend`."""
        _do(self._flows.clear)

    def let_flow(self) -> None:
        """End `hold`, but no other fault."""
        _do(self._flows.set)

    def slow(self, seconds: float) -> None:
        """Delay all traffic."""
        self._delay_seconds = seconds

    def lose(self) -> None:
        """Keep connections open and lose all data. A connection that has lost data never recovers.

        A router that has forgotten a connection behaves in this way.
        """
        self._loses = True

    def swallow_reply_to(self, command: Callable[[bytes], bool]) -> None:
        """Drop the next connection that sends this command, after the server has executed it."""
        self._swallow = command

    def swallow_some(self, share: float, rng: random.Random) -> None:
        """Choose about this share of the connections (0 to 1), and drop each one after the server
        has executed its next command."""

        def arm() -> None:
            for link in self._links:
                link.is_armed = link.is_armed or rng.random() < share

        _do(arm)

    def close(self) -> None:
        self._is_up = False
        _do(self._listener.close)
        _do(self._flows.set)
        _do(lambda: self._cut(self._links))

    def _cut(self, links: set[_Link]) -> int:
        for link in links:
            link.abort()
        return len(links)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            opened = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is down, so the client must find it down
            self.num_turned_away += 1
            writer.close()
            return
        link = _Link((writer, opened[1]))
        if not self._is_up:
            self.num_turned_away += 1
            link.close()
            return
        self._links.add(link)
        self.num_accepted += 1
        try:
            await asyncio.gather(
                self._pass_on(link, reader, opened[1], is_reply=False),
                self._pass_on(link, opened[0], writer, is_reply=True),
            )
        finally:
            self._links.discard(link)

    async def _pass_on(
        self,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_reply: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._flows.wait()
                if self._delay_seconds:
                    await asyncio.sleep(self._delay_seconds)
                link.is_lost = link.is_lost or self._loses
                if link.is_lost:
                    continue
                if is_reply and link.swallows:
                    self.num_swallowed += 1
                    break
                if not is_reply and self._swallows_reply_to(link, data):
                    link.is_armed, link.swallows = False, True
                writer.write(data)
                await writer.drain()
        link.close()

    def _swallows_reply_to(self, link: _Link, sent: bytes) -> bool:
        if link.is_armed:
            return True
        if self._swallow is None or not self._swallow(sent):
            return False
        self._swallow = None
        return True


class _Link:
    """A client's connection to the proxy, and the proxy's connection to the server for it."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._writers = writers
        self.is_armed = False
        """Whether the reply to the next command will be swallowed."""
        self.swallows = False
        self.is_lost = False

    def close(self) -> None:
        """Close the link. Both ends still get the data that was sent before."""
        for writer in self._writers:
            writer.close()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all networks, in a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _do(action: Callable[[], T]) -> T:
    """Run an action in the loop, and return its result."""
    done = Future[T]()

    def act() -> None:
        try:
            done.set_result(action())
        except Exception as error:
            done.set_exception(error)

    _loop().call_soon_threadsafe(act)
    return done.result()
