"""Small tensors on their way to a device and back, without anybody waiting for the device.

A copy from or to memory that is not pinned waits for all that is queued before it, and would turn
a step that is launched ahead into one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any] | Sequence[int], device: torch.device) -> torch.Tensor:
    """Of an array's type, of int64 for a sequence. The array must stay as it is on a CPU."""
    tensor = torch.from_numpy(np.asarray(values, dtype=getattr(values, "dtype", np.int64)))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Tensors being copied to the host, begun behind what is queued now."""

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

    def lists(self) -> list[list[Any]]:
        """Wait for the copies, and for nothing behind them, and give them as lists."""
        if self._copied is not None:
            self._copied.synchronize()
        return [each.tolist() for each in self._tensors]
