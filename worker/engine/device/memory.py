"""How much memory there is to take."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def give_back(device: torch.device) -> None:
    """Return to the device what the allocator keeps for later, and count peaks from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def free_bytes(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the device, or for the CPU of the machine, or of this process's container if less.

    A container's page cache counts as used there, such as weights that were just read; of it,
    `inactive_file` is what the kernel takes back first.
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
