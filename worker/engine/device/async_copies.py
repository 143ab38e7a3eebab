"""Copies small tensors to a device and back without waiting for the device's other work.

Copies from or to memory that is not pinned would wait for all queued work. Then a step could be
launched only after the end of the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns a tensor on the device. An array keeps its dtype; a sequence becomes int64. On a CPU,
    the tensor shares the array's memory, so the caller must not change the array afterwards."""
    tensor = torch.from_numpy(np.asarray(values, dtype=getattr(values, "dtype", np.int64)))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_at_once(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device
) -> list[torch.Tensor]:
    """Copy arrays of any dtypes to the device in one transfer. Returns a tensor for each array."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    # Triton compiles kernels again for addresses that are not multiples of 16.
    ends = np.cumsum([-(-array.nbytes // 16) * 16 for array in arrays])
    starts = [0, *ends[:-1].tolist()]
    together = np.zeros(int(ends[-1]), dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        together[start : start + array.nbytes] = array.ravel().view(np.uint8)
    copied = to_device(together, device)
    return [
        copied[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


class HostCopies:
    """Copies tensors to the host. The copies begin after all work that is already queued."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if self._tensors and self._tensors[0].device.type == "cuda":
            self._tensors = [
                torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as is torch's Stream
            self._copied.record()

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Wait for the copies, but not for later work, and return the copies as arrays."""
        if self._copied is not None:
            self._copied.synchronize()
        return [each.numpy() for each in self._tensors]

    def lists(self) -> list[list[Any]]:
        """Wait for the copies, and return the copies as lists."""
        return [each.tolist() for each in self.arrays()]
