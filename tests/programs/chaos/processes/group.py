"""Processes that end when their owner dies, for whatever reason the owner dies.

Workers die every second or two in a run, and importing torch takes longer than a worker lives. So
each worker is a fork of a process that has imported the libraries, and so is each client. Like any
other worker, a fork opens its connections, loads its model and starts its threads.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from typing import Any

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.processes import hear_signals

_WAIT_FOR_OWNER = "read -r _; kill -9 0"
_LONGEST_LINE = 2**20


class ProcessGroup:
    """A process group whose first member is a shell that waits on a pipe from the owner.

    When the pipe closes, the shell kills the whole group and itself.
    """

    def __init__(self) -> None:
        self._shell: asyncio.subprocess.Process | None = None
        self._members: list[asyncio.subprocess.Process | ForkedMember] = []

    async def start(self) -> None:
        hear_signals()
        self._shell = await asyncio.create_subprocess_exec(
            *["/bin/sh", "-c", _WAIT_FOR_OWNER], stdin=asyncio.subprocess.PIPE, process_group=0
        )

    @property
    def id(self) -> int:
        """The id of the process group."""
        assert self._shell is not None
        return self._shell.pid

    async def spawn(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        """Start a process in the group. `options` are those of `asyncio.create_subprocess_exec`."""
        process = await asyncio.create_subprocess_exec(*command, process_group=self.id, **options)
        self._add(process)
        return process

    def fork(self, server: ForkServer, *command: str, **options: Any) -> ForkedMember:
        """Fork a process in the group. `options` are Popen's. By default, the process's output is a
        pipe."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        process = ForkedProcess(
            [server.python, *command],
            server=server,
            stdin=subprocess.DEVNULL,
            process_group=self.id,
            **pipes,
        )
        member = ForkedMember(process)
        self._add(member)
        return member

    def _add(self, member: asyncio.subprocess.Process | ForkedMember) -> None:
        self._members = [it for it in self._members if it.returncode is None] + [member]

    async def end(self) -> None:
        """Kill all remaining processes."""
        if self._shell is not None and self._shell.stdin is not None:
            self._shell.stdin.close()
            await self._shell.wait()
            await asyncio.gather(*(process.wait() for process in self._members))


def warm_up(server: ForkServer) -> None:
    """Wait until the fork server has imported all libraries. Otherwise the first fork would
    wait."""
    ForkedProcess([server.python, "-c", "pass"], server=server).wait()


class ForkedMember:
    """A forked process with the interface of asyncio's processes."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.terminate, self.kill = process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        """None until `wait` has returned; -n if signal n ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        if self._process.returncode is None:
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            loop.add_reader(self._process.status, lambda: ended.done() or ended.set_result(None))
            try:
                await ended
            finally:
                loop.remove_reader(self._process.status)
        return self._process.wait()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the lines of the process's output until the process ends, and closes the
        output."""
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            async for line in reader:
                yield line
        finally:
            transport.close()
