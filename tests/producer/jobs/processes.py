"""What belongs to a process, so that a test can kill all of it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_all(pid: int) -> None:
    """SIGKILL a process and all its descendants, the eldest first."""
    family, found = [pid], {pid}
    while True:
        new = [child for child, parent in _parents().items() if parent in found - {child}]
        new = [child for child in new if child not in found]
        if not new:
            break
        found |= set(new)
        family += new
    for each in family:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _parents() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents
