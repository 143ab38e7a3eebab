"""`promptq jobs` as a process with all that belongs to it, so that a test can kill it whole."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


async def until_ready(process: Any) -> None:
    told = await asyncio.to_thread(process.stdout.readline)
    assert told.startswith("ready"), told + process.stderr.read()


def family_of(pid: int) -> list[int]:
    """A process and all its descendants, the eldest first."""
    family = [pid]
    while new := [child for child, parent in _parents().items() if _is_new(child, parent, family)]:
        family += new
    return family


def kill_all(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    for each in family_of(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether it lives; one that nobody waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _is_new(child: int, parent: int, family: list[int]) -> bool:
    return parent in family and child not in family


def _parents() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents
