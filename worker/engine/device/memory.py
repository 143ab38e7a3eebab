"""Measures the free memory of a device, and the memory that a piece of work takes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


def counts_memory(device: torch.device) -> bool:
    """Whether the device can report how much memory a piece of work took."""
    return device.type == "cuda"


def give_back(device: torch.device) -> None:
    """Return torch's unused memory to the device, and reset torch's statistics of peak memory."""
    if counts_memory(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)


class MemoryPeak:
    """Measures the peak of torch's memory on a CUDA device since the creation of this object."""

    def __init__(self, device: torch.device) -> None:
        give_back(device)
        self._device = device
        self._reserved = torch.cuda.memory_reserved(device)
        self._allocated = torch.cuda.memory_allocated(device)

    def bytes(self) -> int:
        """Returns the peak number of bytes minus the bytes in use at the beginning.

        Computes this difference for reserved and for allocated bytes, and returns the larger one.
        Reserved memory has gaps, and the same work will have these gaps again.
        """
        return max(
            torch.cuda.memory_reserved(self._device) - self._reserved,
            torch.cuda.max_memory_allocated(self._device) - self._allocated,
        )


def bytes_held(device: torch.device, make: Callable[[], object]) -> int:
    """Returns the bytes that the result of `make` takes on the device, including what the
    driver allocates for it."""
    give_back(device)
    before = free_bytes(device)
    result = make()
    give_back(device)
    held = before - free_bytes(device)
    del result
    give_back(device)
    return max(0, held)


def free_bytes(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the free bytes of the device. For a CPU, returns the free bytes of the machine or of
    the container, whichever is less.

    A container's memory in use includes the page cache, for example weights that were just read.
    Here the part `inactive_file` of the cache, which the kernel reclaims first, counts as free.
    """
    if counts_memory(device):
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    used -= int(counts["inactive_file"])
    return free if limit == "max" else min(free, int(limit) - used)
