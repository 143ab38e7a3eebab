"""Starts the stand-in, asks it and makes it fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import httpx2

from tests.support.processes import running
from tests.support.servers import free_port
from tests.support.waiting import until


@dataclass(frozen=True, slots=True)
class StandIn:
    """A running stand-in. `pid` is that of its process."""

    url: str
    pid: int

    def told(self) -> dict[str, Any]:
        """What runs there, and what came of all that was asked."""
        answer: dict[str, Any] = httpx2.get(f"{self.url}/stand-in").json()
        return answer

    def fail(self, fault: str) -> None:
        """See `FAULTS`; empty ends a fault."""
        httpx2.post(f"{self.url}/stand-in", json={"fault": fault}).raise_for_status()


@contextmanager
def stand_in_server(dialect: str, *options: str, port: int | None = None) -> Iterator[StandIn]:
    """A stand-in until the end of the context."""
    port = port or free_port()
    command = (sys.executable, "-m", "tests.programs.stand_in_server", dialect, "--port", str(port))
    with TemporaryFile("w+") as said, running(*command, *options, stderr=said) as process:
        stand_in = StandIn(f"http://127.0.0.1:{port}", process.pid)

        def answers() -> bool:
            if process.poll() is not None:
                said.seek(0)
                raise AssertionError(f"it ended with {process.returncode}: {said.read()}")
            try:
                return stand_in.told() is not None
            except httpx2.HTTPStatusError:
                return True  # it wants a key
            except httpx2.HTTPError:
                return False

        until(answers)
        yield stand_in
