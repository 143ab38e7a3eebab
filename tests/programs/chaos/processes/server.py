"""The server of a run: it writes down every command before it answers, dies, and comes back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.programs.chaos.processes.group import ProcessGroup
from tests.support.roles import acl_file_for_tests, refusals
from tests.support.servers import answers, free_port, server_program

_LOOK_SECONDS = 0.01


class PersistentServer:
    """A server on one loopback port with `appendonly yes`, `appendfsync always`, and the roles.

    redis-server where it is installed, otherwise the embedded Valkey.
    """

    def __init__(self, folder: Path, group: ProcessGroup) -> None:
        self.port = free_port()
        self._folder = folder
        self._group = group
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @contextmanager
    def opened(self) -> Iterator[redis.Redis]:
        """A client that may do everything."""
        with redis.Redis(port=self.port) as client:
            yield client

    def key_names(self) -> Iterator[str]:
        with self.opened() as client:
            yield from (name.decode() for name in client.scan_iter(count=1000))

    def refusals(self) -> list[str]:
        """What it refused to any role since it started."""
        return refusals(self.url)

    async def start(self) -> None:
        """Start it on what it wrote down before, and wait until it answers."""
        command = [server_program()]
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        command += ["--aclfile", str(acl_file_for_tests(self._folder))]
        with (self._folder / "server.log").open("ab") as log:
            self._process = await self._group.spawn(*command, stdout=log, stderr=log)
        with redis.Redis(port=self.port) as client:
            while not await asyncio.to_thread(answers, client):
                if self._process.returncode is not None:
                    raise RuntimeError(f"the server did not start; see {self._folder}/server.log")
                await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it; what it has written down stays."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()
