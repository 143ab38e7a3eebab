"""Which device a thread works on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device this thread's current one; nothing for other devices.

    Kernels of Triton, streams, graphs and events go to the current device, wherever their tensors
    are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
