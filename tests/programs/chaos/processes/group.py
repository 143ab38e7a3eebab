"""Processes that end with their owner, however it dies."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.processes import hear_signals

_WAIT_FOR_OWNER = "read -r _; kill -9 0"


class ProcessGroup:
    """A process group whose first member is a shell that waits on a pipe from the owner.

    When the pipe closes it ends the whole group, itself included.
    """

    def __init__(self) -> None:
        self._shell: asyncio.subprocess.Process | None = None
        self._spawned: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        hear_signals()
        self._shell = await asyncio.create_subprocess_exec(
            *["/bin/sh", "-c", _WAIT_FOR_OWNER], stdin=asyncio.subprocess.PIPE, process_group=0
        )

    @property
    def id(self) -> int:
        """The group's number."""
        assert self._shell is not None
        return self._shell.pid

    async def spawn(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        """Start a process in the group; `options` are those of asyncio's."""
        process = await asyncio.create_subprocess_exec(*command, process_group=self.id, **options)
        self._spawned = [it for it in self._spawned if it.returncode is None] + [process]
        return process

    async def end(self) -> None:
        """End at once whatever is left of it."""
        if self._shell is not None and self._shell.stdin is not None:
            self._shell.stdin.close()
            await self._shell.wait()
            await asyncio.gather(*(process.wait() for process in self._spawned))
