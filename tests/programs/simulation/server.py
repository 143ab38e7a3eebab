"""The real server of a world. The server executes one command at a time, and its clock is the
world's.

Each connection of the world has a real connection to the server. A PING with each command that may
publish makes sure that the server has written all messages. These messages then go through the
network of the world.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import random
import select
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import hiredis

from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from tests.programs.simulation.jobs_audit import Hold
from tests.programs.simulation.loop import EPOCH, Process
from tests.programs.simulation.network import Link, Network, Transport
from tests.programs.simulation.notes import Script
from tests.programs.simulation.processes import HOST, QUEUE
from tests.programs.traces.recorder import Recorder
from tests.support.preload import compile_preload
from tests.support.processes import start
from tests.support.servers import server_program

_PUBLISHING = {b"EVAL", b"PUBLISH", b"SPUBLISH", b"EXEC"}
_SCRIPTS = {b"EVAL", b"EVALSHA"}
_DISK_FULL = b"-MISCONF Errors writing to the AOF file: No space left on device\r\n"
_SUBSCRIBING = {b"SUBSCRIBE", b"SSUBSCRIBE", b"UNSUBSCRIBE", b"SUNSUBSCRIBE"}
_NOT_OF_MACHINE = (b"redis_version:", b"valkey_version:", b"redis_mode:", b"maxmemory")
"""Beginnings of lines of INFO that are the same on each machine and at each run."""
_LEADER_KEY = Keys("any").jobs_leader.removeprefix(Keys("any").prefix)
_NOTHING = object()
_PING, _PONG = b"PING\r\n", b"+PONG\r\n"
_READ_AT_ONCE = 15_000
"""Bytes that a server certainly reads at once from a connection."""
_PAGE = 1 << 16
_SETTINGS = (
    *("--port", "0", "--unixsocket", "socket", "--enable-debug-command", "yes"),
    *("--save", "", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0"),
    *("--hz", "1", "--dynamic-hz", "no", "--activerehashing", "no"),
)


def compile_library(folder: Path) -> Path:
    """Compile the library that servers of worlds preload, for the world's clock and entropy.
    Returns its path."""
    return compile_preload(Path(__file__).with_name("preload.c"), folder)


class ServerProcess:
    """The server of one world, in an empty folder. With `keeps_data`, the server's data remains
    when the server is killed.

    `kind` is one of `PROGRAMS`, or empty for the program that tests prefer.
    """

    def __init__(
        self, folder: Path, library: Path, kind: str = "", *, keeps_data: bool = True
    ) -> None:
        self.path = folder / "socket"
        self.folder = folder
        append_only = "yes" if keeps_data else "no"
        self._command = [server_program(kind), *_SETTINGS, "--appendonly", append_only]
        self._environment = {
            "LD_PRELOAD": str(library),
            "SIMULATION_CLOCK": str(folder / "clock"),
            "SIMULATION_ENTROPY": str(folder / "entropy"),
        }
        (folder / "clock").write_bytes(bytes(8))
        (folder / "entropy").write_bytes(random.Random(1).randbytes(4096))
        with (folder / "clock").open("r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 8)
        self._shown = 0
        self.set_time(EPOCH)
        self.is_running = False

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        with (self.folder / "errors").open("ab") as errors:
            self._process = start(
                *self._command,
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self.is_running = True
        while True:
            try:
                self._control = self.connected()
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if self._process.poll() is not None:
                    errors_text = (self.folder / "errors").read_text()
                    raise RuntimeError(
                        f"the world's server did not start: {errors_text}"
                    ) from error
                select.select([], [], [], 0.002)  # sleeps outside of the world's time
        while self._ask(_PING) != _PONG:  # it loads its data
            select.select([], [], [], 0.002)
        # Only commands may delete expired keys: the server's search for them is not repeatable.
        assert self._ask(b"DEBUG SET-ACTIVE-EXPIRE 0\r\n") == b"+OK\r\n"

    def kill(self) -> None:
        """Kill the server."""
        self.is_running = False
        self._process.kill()
        self._process.wait()
        self._control.close()
        self.path.unlink()

    def connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection

    def set_time(self, unix_seconds: float) -> None:
        self.set_microseconds(int(unix_seconds * 1e6))

    def set_microseconds(self, unix_microseconds: int) -> None:
        nanoseconds = unix_microseconds * 1000
        if nanoseconds != self._shown:
            self._shown = nanoseconds
            struct.pack_into("<q", self._clock, 0, nanoseconds)

    def ask(self, *commands: Sequence[str | int]) -> list[Any]:
        """Send commands directly, not through the network of the world. Returns the replies."""
        reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._control.sendall(b"".join(map(hiredis.pack_command, map(tuple, commands))))
        replies: list[Any] = []
        while len(replies) < len(commands):
            while (reply := reader.gets()) is not _NOTHING:
                replies.append(reply)
            if len(replies) < len(commands):
                reader.feed(self._control.recv(_PAGE))
        return replies

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of CPU that the server has used since its start."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e6

    def wait_for_writes(self) -> None:
        """Wait until the server has written everything that earlier commands caused."""
        assert self._ask(_PING) == _PONG

    def _ask(self, command: bytes) -> bytes:
        self._control.sendall(command)
        return self._control.recv(_PAGE)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.kill()


class SteppedServer:
    """The server as the processes of a world reach it, at the host `HOST`."""

    def __init__(
        self, network: Network, process: ServerProcess, recorder: Recorder | None = None
    ) -> None:
        self.loop = network.loop
        self.trace = network.trace
        self.process = process
        self.host = Process(self.loop, HOST)
        self.restarting: asyncio.Task[None] | None = None
        """Ends when the server runs again."""
        self._network = network
        self._recorder = recorder
        self.holds: list[Hold] = []
        """All calls that take or renew the lead of the jobs."""
        self.acts: list[tuple[str, float]] = []
        """The processes that enqueued jobs, and when they did."""
        self.num_commands: Counter[str] = Counter()
        """Number of commands by the process that sent them."""
        self.scripts: list[Script] = []
        """All scripts that workers sent and that were not refused."""
        self.num_refused: Counter[Process] = Counter()
        """Number of refused scripts of each process."""
        self.full_until = 0.0
        """The world's time until which the server refuses scripts, because its disk is full."""
        self._subscribers: list[ServerConnection] = []
        self._poll = select.poll()
        texts = {name: script_text(name) for name in SCRIPT_NAMES}
        self._names = {hashlib.sha1(texts[name].encode()).hexdigest(): name for name in texts}
        self._publishing = {
            digest.encode() for digest, name in self._names.items() if "PUBLISH" in texts[name]
        }

        self._hold_digest = hashlib.sha1(texts["hold_lease"].encode()).hexdigest().encode()

    def configure(self, queue: Keys, settings: Mapping[str, int]) -> None:
        """Set the settings of a queue, before the world begins."""
        command = ("HSET", queue.config, *chain.from_iterable(settings.items()))
        [num_new] = self.process.ask(command)
        if self._recorder is not None:
            words = [str(word).encode() for word in command]
            at_us = int((EPOCH + self.loop.now) * 1e6)
            self._recorder.note(None, "world", at_us, words, b":%d\r\n" % num_new)

    def listen(self) -> None:
        self._network.listen(HOST, self.host, self.accept)

    def restart(self, seconds: float) -> None:
        """Kill the server. The server starts again after `seconds`."""
        self.process.kill()
        self._network.unlisten(HOST)

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            self.process.set_time(EPOCH + self.loop.now)
            self.process.start()
            self.listen()

        self.restarting = self.loop.root.start(come_back())

    @property
    def subscribed_links(self) -> list[Link]:
        return [subscriber.transport.link for subscriber in self._subscribers]

    def accept(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        return ServerConnection(self)

    def execute(self, connection: ServerConnection, command: Sequence[bytes]) -> bytes:
        """Execute a command. Returns the bytes of its replies."""
        sender = connection.transport.peer.process
        self.num_commands[sender.name] += 1
        name = command[0].upper()
        if self.trace.is_told:
            self.trace.tell(sender, f"sends {self._shown(name, command)}")
        at_us = int((EPOCH + self.loop.now) * 1e6)
        self.process.set_microseconds(at_us)
        if self.loop.now < self.full_until and name in _SCRIPTS:
            self.num_refused[sender] += 1
            return _DISK_FULL
        num_replies = max(1, len(command) - 1) if name in _SUBSCRIBING else 1
        packed = hiredis.pack_command(tuple(command))
        publishes = bool(self._subscribers) and (
            name in _PUBLISHING or (name == b"EVALSHA" and command[1] in self._publishing)
        )
        # A server writes last to the client to which it replied first since it last wrote. So with
        # a PING that the server reads at once with the command, the messages precede the replies.
        leads = publishes and name != b"EXEC" and len(packed) < _READ_AT_ONCE
        if leads:
            replies = connection.exchange(_PING + packed, 1 + num_replies).removeprefix(_PONG)
        else:
            replies = connection.exchange(packed, num_replies)
        if self._recorder is not None:
            self._recorder.note(connection, sender.name, at_us, command, replies)
        if name == b"EVALSHA" and sender.name.startswith("worker"):
            script = self._names.get(command[1].decode(), "")
            self.scripts.append(Script(sender.name, script, self.loop.now))
        if name == b"EVALSHA" and command[1] == self._hold_digest:
            self._note_hold(sender.name, command, replies)
        if name == b"RPUSH" and command[1].startswith(b"rq:queue:"):
            self.acts.append((sender.name, self.loop.now))
        if name == b"INFO":
            replies = _without_machine(replies)
        if name == b"CLIENT" and command[1] == b"INFO":  # RQ reads its address there
            replies = b"$16\r\naddr=127.0.0.1:1\r\n"
        if name in _SUBSCRIBING and connection not in self._subscribers:
            self._subscribers.append(connection)
            self._poll.register(connection.socket, select.POLLIN)
        if publishes:
            if not leads:
                self.process.wait_for_writes()
            self._bring_messages()
        return replies

    def report_cancels(self) -> None:
        """Publish a message `cancel` for each running request."""
        if not self.process.is_running:
            return
        keys = Keys(QUEUE)
        [running] = self.process.ask(("ZRANGE", keys.leases, 0, -1))
        self.process.ask(
            *(("PUBLISH", keys.control, f"cancel:{each.decode()}") for each in running)
        )
        self.process.wait_for_writes()
        self._bring_messages()

    def close(self, connection: ServerConnection) -> None:
        if connection in self._subscribers:
            self._subscribers.remove(connection)
            self._poll.unregister(connection.socket)
        connection.socket.close()
        if self.process.is_running:
            self.process.wait_for_writes()  # the server has noticed the end

    def _bring_messages(self) -> None:
        ready = {descriptor for descriptor, _ in self._poll.poll(0)}
        for subscriber in self._subscribers if ready else ():
            if subscriber.socket.fileno() in ready:
                messages, link = subscriber.socket.recv(_PAGE), subscriber.transport.link
                if self.loop.now < link.swallows_messages_until:
                    self.trace.note(link.near.process, f"gets no messages on link {link.number}")
                else:
                    subscriber.transport.write(messages)

    def _note_hold(self, sender: str, command: Sequence[bytes], reply: bytes) -> None:
        key, holder, ttl_ms = (word.decode() for word in command[-3:])
        if key == _LEADER_KEY:
            has_worked = reply == b":1\r\n"
            self.holds.append(Hold(sender, holder, int(ttl_ms), has_worked, self.loop.now))

    def _shown(self, name: bytes, command: Sequence[bytes]) -> str:
        words = [name.decode()]
        rest = list(command[1:])
        if name == b"EVALSHA":
            words = [self._names.get(rest[0].decode(), "a script")]
            rest = rest[3:]
        words += [word.decode("utf-8", "backslashreplace") for word in rest]
        line = " ".join(words).replace("\n", " ")
        return line if len(line) <= 200 else line[:200] + " ..."


class ServerConnection(asyncio.Protocol):
    """The server's end of a connection of the world."""

    def __init__(self, server: SteppedServer) -> None:
        self.transport: Transport
        self.socket = server.process.connected()
        self._server = server
        self._commands = hiredis.Reader(notEnoughData=_NOTHING)
        self._replies = hiredis.Reader(notEnoughData=_NOTHING)
        self._is_closed = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._commands.feed(data)
        while (command := self._commands.gets()) is not _NOTHING:
            self.transport.write(self._server.execute(self, command))

    def exchange(self, packed: bytes, num_replies: int) -> bytes:
        """Send a command to the real server. Returns the bytes of `num_replies` replies."""
        self.socket.sendall(packed)
        received = b""
        while num_replies:
            data = self.socket.recv(_PAGE)
            if not data:
                raise RuntimeError("the server of the world went away")
            received += data
            self._replies.feed(data)
            while num_replies and self._replies.gets() is not _NOTHING:
                num_replies -= 1
        return received

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._server.close(self)


def _without_machine(reply: bytes) -> bytes:
    """Returns a reply to INFO without the lines that another run would not repeat."""
    lines = [line for line in reply.split(b"\r\n") if line.startswith(_NOT_OF_MACHINE)]
    text = b"\r\n".join(lines) + b"\r\n"
    return b"$%d\r\n%s\r\n" % (len(text), text)
