"""Replaces the clocks, the entropy and the machine's names by those of a simulated world.

Call `install` before any module of promptq is imported: some modules keep `time.monotonic` as a
default argument. Outside of a world, the functions return the real values.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol


class Machine(Protocol):
    """The simulated machine of the process that runs now: its clocks, entropy and names."""

    name: str
    pid: int

    def monotonic(self) -> float: ...

    def perf_counter(self) -> float: ...

    def wall(self) -> float: ...

    def entropy(self, size: int) -> bytes: ...

    def sleep(self, seconds: float) -> None: ...


running: Machine | None = None
"""The simulated process whose code runs now; None outside of a world."""


def install() -> None:
    """Replace the functions that read the clock, entropy and names. Inside a world, they use
    `running`."""
    _replace(time, "monotonic", lambda machine: machine.monotonic())
    _replace(time, "monotonic_ns", lambda machine: int(machine.monotonic() * 1e9))
    _replace(time, "perf_counter", lambda machine: machine.perf_counter())
    _replace(time, "perf_counter_ns", lambda machine: int(machine.perf_counter() * 1e9))
    _replace(time, "time", lambda machine: machine.wall())
    _replace(time, "time_ns", lambda machine: int(machine.wall() * 1e9))
    _replace(time, "sleep", lambda machine, seconds: machine.sleep(seconds))
    _replace(os, "urandom", lambda machine, size: machine.entropy(size))
    _replace(os, "getpid", lambda machine: machine.pid)
    _replace(socket, "gethostname", lambda machine: machine.name)
    random._urandom = os.urandom  # type: ignore[attr-defined] # `secrets` draws from this name


def _replace(module: Any, name: str, simulated: Callable[..., Any]) -> None:
    real = getattr(module, name)

    def answer(*args: Any) -> Any:
        return real(*args) if running is None else simulated(running, *args)

    setattr(module, name, answer)
