"""Memory for a step's largest intermediate results."""

from __future__ import annotations

import torch


class Scratch:
    """Buffers that are reused from step to step.

    On a CPU, allocating a tensor for a batch of logits takes longer than most operations on the
    tensor. The reason is that the operating system maps the pages one by one. On CUDA, torch
    allocates all tensors from a pool anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Returns an uninitialised fp32 tensor [rows, columns], valid until the next call with this
        `name`."""
        if self._device.type != "cpu":
            return torch.empty(rows, columns, dtype=torch.float32, device=self._device)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows or buffer.shape[1] != columns:
            buffer = torch.empty(rows, columns, dtype=torch.float32)
            self._buffers[name] = buffer
        return buffer[:rows]
