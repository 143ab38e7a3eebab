"""TF32 is off while a model is checked, and where it cannot be switched off, that is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from promptq.worker.engine.device.precision import exact_products

CPU = torch.device("cpu")
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def restoring() -> Iterator[None]:
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


def forced_tf32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product whose operands are rounded to 11 bits, whatever the switches say."""
    kept = ~0x1FFF
    rounded = [
        ((each.view(torch.int32) + 0x1000) & kept).view(torch.float32) for each in (left, right)
    ]
    return rounded[0] @ rounded[1]


def test_tf32_is_off_and_then_as_before() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products(CPU) as are_exact:
            assert are_exact
            assert torch.get_float32_matmul_precision() == "highest"
            assert MATMUL.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert MATMUL.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_newer_switch_does_not_mix_with_the_older_one() -> None:
    MATMUL.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with exact_products(CPU):
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "tf32"


def test_tf32_that_is_forced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", forced_tf32)
    with exact_products(CPU) as are_exact:
        assert not are_exact
