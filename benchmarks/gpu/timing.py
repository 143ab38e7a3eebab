"""Measures the time of calls on the device, and the device's highest rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Returns the median seconds of one call of `work`, after two calls that warm up the device."""
    for _ in range(2 if device.type == "cuda" else 0):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a step, by the start of its name. Times are in microseconds."""

    name: str
    launches: float
    each: float

    @property
    def in_step(self) -> float:
        return self.launches * self.each


def kernels_of(step: Callable[[], object], num_steps: int = 10) -> list[KernelTime]:
    """Returns the kernels of a step on the current CUDA device, longest first. Times are means over
    `num_steps` steps."""
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


CARDS = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12}
"""Bytes a second that the memory of a card allows, by a part of its name, as NVIDIA states them."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that the memory and the matrix units reach here, on random data."""

    copied_per_second: float
    """Bytes of a copy from device to device; bytes read and bytes written are both counted."""
    flops: float
    """Operations a second of a bf16 product of large square matrices."""
    card: str = ""
    """The name in CARDS, if the device is one of them."""

    @property
    def bytes_per_second(self) -> float:
        """The rate of the card's data sheet, or if that is unknown, the rate of a copy."""
        return CARDS.get(self.card, self.copied_per_second)


def measure_ceilings(device: torch.device, *, tiny: bool) -> Ceilings:
    size = 1 << 24 if tiny else 1 << 32
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), device, repeats=10)
    width = 256 if tiny else 8192
    left, right = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiplied = seconds(lambda: left @ right, device, repeats=10)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    card = next((card for card in CARDS if card in name), "")
    return Ceilings(2 * size / copied, 2 * width**3 / multiplied, card)
