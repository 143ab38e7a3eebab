"""The machine's limits: rates measured in the same run, and the least time of a decode step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.lib.models import Shape

_BYTES = 2**29
_ROWS, _WIDTH = 1024, 4096
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of all cores together."""

    bytes_per_second: float
    """The rate of reading memory in order."""
    operations_per_second: float
    """A matrix product of 1,024 rows in torch_dtype(); a multiply-add is two operations."""


def torch_dtype() -> str:
    """Returns bfloat16, or float32 on processors for which torch has no fast products in bf16."""
    from promptq.worker.engine.device.precision import has_fast_bf16_products

    return "bfloat16" if has_fast_bf16_products() else "float32"


def measure_rates() -> Rates:
    """Returns the highest rates of several tries, because disturbances only slow a try down."""
    import torch

    dtype: torch.dtype = getattr(torch, torch_dtype())
    with torch.inference_mode():
        left = torch.randn(_ROWS, _WIDTH).to(dtype)
        right = torch.randn(_WIDTH, _WIDTH).to(dtype)
        product = _best(lambda: left @ right)
    return Rates(measure_reading(), 2 * _ROWS * _WIDTH * _WIDTH / product)


def measure_reading() -> float:
    """Returns the bytes of memory that all cores together read in a second."""
    import torch

    dtype: torch.dtype = getattr(torch, torch_dtype())
    numbers = torch.ones(_BYTES // 4)
    weights = torch.ones(_BYTES // dtype.itemsize // _WIDTH, _WIDTH, dtype=dtype)
    vector = torch.ones(_WIDTH, dtype=dtype)
    with torch.inference_mode():
        return _BYTES / min(_best(lambda: numbers.sum()), _best(lambda: weights @ vector))


def decode_floor(shape: Shape, rates: Rates, batch: int, length: int) -> float:
    """Returns the least seconds of a decode step for `batch` sequences of `length` tokens.

    Each weight and each live key and value is read once; each row takes two operations a weight.
    """
    num_bytes = shape.weight_bytes + batch * length * shape.kv_bytes_per_token
    operations = batch * (
        2 * shape.num_parameters + 4 * shape.layers * shape.heads * shape.head_dim * length
    )
    return max(num_bytes / rates.bytes_per_second, operations / rates.operations_per_second)


def _best(work: Callable[[], object]) -> float:
    """Returns the seconds of the fastest repeat."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
