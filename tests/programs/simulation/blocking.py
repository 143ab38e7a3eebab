"""Blocking code in a simulated process: its sleeps and sockets wait in the world's time.

Each program has a thread. The event loop waits while the thread runs, and the thread waits while
the loop runs. So only one of them runs at a time, and the seed decides when.
"""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from typing import Any

import redis._parsers.hiredis
import redis.connection

from tests.programs.simulation import clock
from tests.programs.simulation.loop import Process


class KilledError(BaseException):
    """Raised in the thread of a process that was killed, or whose world is over. Ends the
    thread."""


class BlockingThread:
    """A thread of a simulated process, which runs `function`. `main` is the thread's task in the
    loop."""

    def __init__(self, process: Process, function: Callable[[], None]) -> None:
        self.process = process
        self._function = function
        self._may_run, self._has_paused = _thread.allocate_lock(), _thread.allocate_lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        self._number = 0
        """Number of the current wait. A late wake-up has an earlier number."""
        self._is_over = self._is_killed = False
        self._error: BaseException | None = None
        self._ended: asyncio.Future[None] = process.loop.create_future()
        process.thread = self
        threading.Thread(target=self._run, daemon=True, name=process.name).start()
        self.main = process.start(self._live())

    def wait(self, seconds: float | None, begin: Callable[[Callable[[], None]], None]) -> None:
        """Pause the thread. `begin` gets a function that ends the pause. The pause also ends after
        `seconds`."""
        self._check_alive()
        self._number += 1
        number = self._number

        def wake() -> None:
            if number == self._number:
                self._number += 1
                self._go_on()

        begin(wake)
        if seconds is not None:
            context = self.process.context.copy()
            context.run(self.process.loop.call_later, seconds, wake)
        self._has_paused.release()
        self._may_run.acquire()
        self._check_alive()

    def close(self) -> None:
        """End the thread, at the end of its world, without running further code of the world."""
        self._is_killed = True
        if not self._is_over:
            clock.running = self.process
            self._go_on()
            clock.running = None

    async def _live(self) -> None:
        self._go_on()
        await self._ended

    def _go_on(self) -> None:
        self._may_run.release()
        self._has_paused.acquire()
        if self._is_over and not self._ended.done() and not self._is_killed:
            if self._error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(self._error)

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._is_killed:
                self.process.context.copy().run(self._function)
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._has_paused.release()

    def _check_alive(self) -> None:
        if self._is_killed:
            raise KilledError


class BlockingSocket(asyncio.Protocol):
    """A connected socket with the methods that redis-py calls."""

    def __init__(self, thread: BlockingThread, host: str, port: int, timeout: float | None) -> None:
        self._thread = thread
        self._timeout = timeout
        self._transport: Any = None
        self._unread = bytearray()
        self._is_closed = False
        self._error: Exception | None = None
        self._wake: Callable[[], None] = _do_nothing
        process = thread.process
        connecting = process.start(process.loop.create_connection(lambda: self, host, port))
        self._wait(lambda: connecting.add_done_callback(self._on_done, context=process.context))
        if not connecting.done():
            connecting.cancel()
            raise TimeoutError("timed out")
        connecting.result()

    # ------------------------------------------------------------ what the transport calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed, self._error = True, error
        self._wake()

    # ------------------------------------------------------------ what redis-py calls

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        self._thread._check_alive()
        if self._is_closed:
            raise self._error or BrokenPipeError(32, "Broken pipe")
        self._transport.write(data)

    def recv_into(self, buffer: bytearray) -> int:
        if not self._unread and not self._is_closed:
            if self._timeout == 0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            self._wait(_do_nothing)
        if self._unread:
            size = min(len(buffer), len(self._unread))
            buffer[:size] = self._unread[:size]
            del self._unread[:size]
            return size
        if self._error is not None:
            raise self._error
        if not self._is_closed:
            raise TimeoutError("timed out")
        return 0

    def shutdown(self, how: int) -> None:
        """Does nothing: `close` follows."""

    def close(self) -> None:
        if self._transport is not None and not self._thread._is_killed:
            self._transport.close()

    def can_read(self) -> bool:
        return bool(self._unread) or self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed and not self._unread

    def _wait(self, begin: Callable[[], object]) -> None:
        def keep(wake: Callable[[], None]) -> None:
            self._wake = wake
            begin()

        self._thread.wait(self._timeout, keep)
        self._wake = _do_nothing

    def _on_done(self, _task: Any) -> None:
        self._wake()


def _do_nothing() -> None:
    pass


def install() -> None:
    """Make redis-py's blocking connections use the world's network."""
    connect = redis.connection.Connection._connect
    parser: Any = redis._parsers.hiredis
    can_read, is_closed = parser._socket_can_read, parser._socket_is_closed

    def simulated_connect(connection: Any) -> Any:
        process = clock.running
        if isinstance(process, Process) and process.thread is not None:
            timeout = connection.socket_connect_timeout
            made = BlockingSocket(process.thread, connection.host, connection.port, timeout)
            made.settimeout(connection.socket_timeout)
            return made
        return connect(connection)

    def simulated_can_read(sock: Any, timeout: float) -> bool:
        if isinstance(sock, BlockingSocket):
            return sock.can_read()
        return bool(can_read(sock, timeout))

    def simulated_is_closed(sock: Any) -> bool:
        return sock.is_closed() if isinstance(sock, BlockingSocket) else bool(is_closed(sock))

    redis.connection.Connection._connect = simulated_connect  # type: ignore[method-assign]
    parser._socket_can_read, parser._socket_is_closed = simulated_can_read, simulated_is_closed
