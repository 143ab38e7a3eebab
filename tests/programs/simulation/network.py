"""The network of a world: connections between processes, whose bytes take time and may be lost.

Bytes of one connection arrive in order, cut into pieces at places that the seed chooses. Different
connections overtake one another.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.programs.simulation.loop import Process, SimulatedLoop
from tests.programs.simulation.trace import Trace

_LONGEST_LATENCY_SECONDS = 0.004
_LONGEST_CONNECT_SECONDS = 0.01
_CUT_SHARE = 0.05
"""Share of writes that arrive in two pieces."""


class Network:
    """All connections of a world. A client connects to the name of a host, and reaches the process
    that listens there."""

    def __init__(self, loop: SimulatedLoop, trace: Trace) -> None:
        self.loop = loop
        self.trace = trace
        self.rng = random.Random(f"{loop.seed} network")
        self.links: list[Link] = []
        self.num_links = 0
        self.num_connects: Counter[Process] = Counter()
        """Number of connections that each process has opened or tried to open."""
        self._listeners: dict[str, tuple[Process, Callable[[], asyncio.Protocol]]] = {}
        self._held_until: dict[Process, float] = {}
        self._refused_until: dict[Process, float] = {}
        loop.connect, loop.listen = self.connect, self.listen

    def listen(
        self, host: str, process: Process, factory: Callable[[], asyncio.Protocol]
    ) -> Listener:
        """Accept all connections to `host` in `process`. `factory` makes the protocol of each
        connection."""
        self._listeners[host] = (process, factory)
        return Listener(self, host)

    def stop_listening(self, host: str) -> None:
        """Refuse all connections to `host` from now on."""
        self._listeners.pop(host, None)

    async def connect(
        self, client: Process, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[Transport, asyncio.Protocol]:
        """Open a connection for a client. Raises ConnectionRefusedError if nobody listens."""
        self.num_connects[client] += 1
        await asyncio.sleep(self._draw(_LONGEST_CONNECT_SECONDS))
        while (held_until := self.held_until(client)) > self.loop.now:
            await asyncio.sleep(held_until - self.loop.now + 0.001)
        listener = self._listeners.get(host)
        if listener is None or self._refused_until.get(client, 0.0) > self.loop.now:
            self.trace.note(client, "is refused a connection")
            raise ConnectionRefusedError(111, f"Connect call failed ({host!r}, {port})")
        server, accept = listener
        link = Link(self, client, server)
        protocol = factory()
        link.near.protocol = protocol
        protocol.connection_made(link.near)
        link.deliver(link.far, link.far.accept, accept)
        return link.near, protocol

    def unlisten(self, host: str) -> None:
        """Refuse all connections to `host`, and cut those that are open."""
        process, _ = self._listeners.pop(host)
        for link in self.of(process):
            link.cut()

    def hold(self, process: Process, seconds: float) -> None:
        """Deliver nothing to and from a process for `seconds`, and then deliver everything."""
        self._held_until[process] = self.loop.now + seconds

    def refuse(self, process: Process, seconds: float) -> None:
        """Refuse new connections of a process for `seconds`."""
        self._refused_until[process] = self.loop.now + seconds

    def heal(self) -> None:
        """End all holds and refusals, and cancel losses that have not happened yet."""
        self._held_until.clear()
        self._refused_until.clear()
        for link in self.links:
            link.swallows_replies = False
            link.swallows_messages_until = 0.0

    def held_until(self, process: Process) -> float:
        return self._held_until.get(process, 0.0)

    def of(self, process: Process) -> list[Link]:
        """Returns the open connections of a process."""
        return [link for link in self.links if process in (link.near.process, link.far.process)]

    def bury(self, process: Process) -> None:
        """Close the connections of a process that was killed, as the kernel does."""
        for host in [host for host, (at, _) in self._listeners.items() if at is process]:
            self.stop_listening(host)
        for link in self.of(process):
            end = link.near if link.near.process is process else link.far
            end.is_dead = True
            link.end(end)

    def _draw(self, longest: float) -> float:
        draw = self.rng.random()
        return longest * draw * draw * draw


class Listener:
    """Implements the part of `asyncio.Server` that uvicorn uses."""

    sockets = ()

    def __init__(self, network: Network, host: str) -> None:
        self._network = network
        self._host = host

    def close(self) -> None:
        self._network.stop_listening(self._host)

    async def wait_closed(self) -> None:
        return


class Link:
    """One connection. `near` is the client's end, and `far` is the end of the process that
    listens."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        network.num_links += 1
        network.links.append(self)
        self.number = network.num_links
        self.network = network
        self.near = Transport(self, client)
        self.far = Transport(self, server)
        self.swallows_replies = False
        """Whether the next reply is lost, and the connection with it."""
        self.swallows_messages_until = 0.0
        """The time until which the server sends no messages of channels to this connection."""
        self._is_cut = False
        self._latency = network._draw(_LONGEST_LATENCY_SECONDS)
        self.near.peer, self.far.peer = self.far, self.near

    def carry(self, sender: Transport, data: bytes) -> None:
        """Send data to the other end."""
        receiver = sender.peer
        if receiver is self.near and self.swallows_replies:
            self.network.trace.note(receiver.process, f"loses a reply on link {self.number}")
            self.cut()
        rng = self.network.rng
        if len(data) > 1 and rng.random() < _CUT_SHARE:
            at = rng.randrange(1, len(data))
            self.deliver(receiver, receiver.receive, data[:at])
            data = data[at:]
        self.deliver(receiver, receiver.receive, data)

    def end(self, sender: Transport) -> None:
        """Tell the other end that the sender sends no more data."""
        receiver = sender.peer
        self.deliver(receiver, receiver.receive_end)
        if receiver.is_over and self in self.network.links:
            self.network.links.remove(self)

    def cut(self) -> None:
        """Lose all data that has not arrived yet, and reset both ends."""
        if self._is_cut:
            return
        self._is_cut = True
        if self in self.network.links:
            self.network.links.remove(self)
        for end in (self.near, self.far):
            when = self.network.loop.now + self.network._draw(2 * _LONGEST_LATENCY_SECONDS)
            self.network.loop.at(when, end.process, end.reset)

    def deliver(self, receiver: Transport, callback: Callable[..., None], *args: Any) -> None:
        """Call `callback` in the receiver's process at the time when data that is sent now arrives
        there."""
        network = self.network
        arrival = network.loop.now + self._latency + network._draw(_LONGEST_LATENCY_SECONDS)
        arrival = receiver.last_arrival = max(arrival, receiver.last_arrival)
        network.loop.at(arrival, receiver.process, self._arrive, receiver, callback, args)

    def _arrive(self, receiver: Transport, callback: Callable[..., None], args: Any) -> None:
        network = self.network
        if self._is_cut:
            return
        held = network.held_until
        held_until = max(held(receiver.process), held(receiver.peer.process))
        if held_until > network.loop.now:
            receiver.last_arrival = max(receiver.last_arrival, held_until)
            network.loop.at(held_until, receiver.process, self._arrive, receiver, callback, args)
            return
        callback(*args)


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, link: Link, process: Process) -> None:
        super().__init__()
        self.process = process
        self.protocol: Any = None
        self.is_dead = False
        """Whether the process was killed."""
        self.is_over = False
        """Whether nothing more is sent from here."""
        self.link = link
        self.peer: Transport
        self.last_arrival = 0.0
        """When the data arrives here that the other end has sent last."""
        self._was_lost = False
        self._is_paused = False
        self._unread: list[bytes] = []

    def accept(self, factory: Callable[[], asyncio.Protocol]) -> None:
        self.protocol = factory()
        self.protocol.connection_made(self)

    def write(self, data: Any) -> None:
        if not self.is_over and data:
            self.link.carry(self, bytes(data))

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.link.end(self)
            self.process.loop.call_soon(self._lose, None)

    abort = close

    def is_closing(self) -> bool:
        return self.is_over

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", self.link.number) if name == "peername" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        unread, self._unread = self._unread, []
        for data in unread:
            self.receive(data)

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def receive(self, data: bytes) -> None:
        if self._was_lost or self.is_dead:
            return
        if self._is_paused:
            self._unread.append(data)
            return
        self.link.network.trace.chunk(self.process, self.link.number, data)
        self.protocol.data_received(data)

    def receive_end(self) -> None:
        if not self._was_lost and not self.is_dead and not self.protocol.eof_received():
            self.close()

    def reset(self) -> None:
        self.is_over = True
        if not self.is_dead and self.protocol is not None:
            self._lose(ConnectionResetError(104, "Connection reset by peer"))

    def _lose(self, error: Exception | None) -> None:
        if not self._was_lost:
            self._was_lost = True
            self.protocol.connection_lost(error)
