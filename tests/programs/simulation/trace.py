"""The record of a world: a hash of everything that happens, and a log for people (the story)."""

from __future__ import annotations

import hashlib
import struct
from typing import TextIO

from tests.programs.simulation.loop import Process, SimulatedLoop

_CHUNK = struct.Struct("<dII")


class Trace:
    """Hashes each event of a world with its time. Also writes events to the log `story`, unless it
    is None."""

    def __init__(self, loop: SimulatedLoop, story: TextIO | None = None) -> None:
        self._loop = loop
        self._story = story
        self._hash = hashlib.blake2b(digest_size=16)
        loop.tell = self.tell

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    @property
    def is_told(self) -> bool:
        """Whether a log is written."""
        return self._story is not None

    def tell(self, process: Process, what: str) -> None:
        """Write a line to the log, but not into the hash."""
        if self._story is not None:
            self._story.write(f"{self._loop.now:11.6f}  {process.name:12} {what}\n")

    def note(self, process: Process, what: str) -> None:
        """Add an event of a process to the hash and to the log."""
        self._hash.update(f"{self._loop.now:.9f} {process.pid} {what}".encode())
        self.tell(process, what)

    def chunk(self, process: Process, number: int, data: bytes) -> None:
        """Add bytes to the hash that arrive at a process on the connection with this number."""
        self._hash.update(_CHUNK.pack(self._loop.now, process.pid, number) + data)
