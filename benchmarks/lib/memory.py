"""Peak memory of a tree of processes, from /proc. On systems other than Linux, all peaks are 0,
which means unknown."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def tree(*roots: int) -> list[int]:
    """Returns the ids of these processes and of all their descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid for pid in roots if pid in parents]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def reset_peak(pids: list[int]) -> None:
    """Reset the kernel's count of these processes' peaks of memory."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pids: list[int]) -> int:
    """Returns the sum of the processes' peaks of resident memory, in bytes. Shared pages count for
    each process."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def own_tree() -> list[int]:
    return tree(os.getpid())


@contextmanager
def watching_own_memory() -> Iterator[list[int]]:
    """Measure the memory that belongs to this process alone, without pages of mapped files. At the
    end of the context, the yielded list has one number: the peak in bytes minus the value at the
    beginning."""
    at_first, peak, ended = _own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], _own_bytes() - at_first)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        ended.set()
        watching.join()


def _own_bytes() -> int:
    [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024
