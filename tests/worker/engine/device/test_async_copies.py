"""Arrays that go to a device together, without a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from promptq.worker.engine.device import async_copies
from promptq.worker.engine.device.async_copies import to_device_at_once

SHAPES = [(1, 5), (0,), (3, 7), (4,), (2, 0), (9,)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arrays_are_copied_at_once_and_lie_at_even_places(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []

    def copy(array: Any, _: torch.device) -> torch.Tensor:
        copies.append(array.size)
        return torch.from_numpy(array)

    monkeypatch.setattr(async_copies, "to_device", copy)
    rng = np.random.default_rng(5)
    arrays = [rng.integers(-9, 9, shape) for shape in SHAPES]
    tensors = to_device_at_once(arrays, torch.device(device))
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), array)
    if device == "cuda":
        assert len(copies) == 1
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
