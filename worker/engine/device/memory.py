"""How much memory is free on a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def give_back(device: torch.device) -> None:
    """Return the allocator's unused memory to the device, and start to count peaks anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def free_bytes(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The free memory of the device. For the CPU: of the machine, or of the container if less.

    A container counts its page cache as used, for example weights that were just read. Its part
    `inactive_file`, which the kernel reclaims first, counts as free here.
    """
    if device.type == "cuda":
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
