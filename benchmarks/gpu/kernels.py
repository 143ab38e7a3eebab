"""Which kernels a decode step launches on the device, and how long each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 10
"""The steps that are profiled. The figures are means."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a step, by the start of its name. Times are in microseconds."""

    name: str
    launches: float
    each: float

    @property
    def in_step(self) -> float:
        return self.launches * self.each


def kernels_of(step: Callable[[], object], num_steps: int = STEPS) -> list[KernelTime]:
    """The kernels of a step on the current CUDA device, those that take longest first."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    times = [
        KernelTime(
            event.key[:60], event.count / num_steps, event.self_device_time_total / event.count
        )
        for event in profiled.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(times, key=lambda it: -it.in_step)
