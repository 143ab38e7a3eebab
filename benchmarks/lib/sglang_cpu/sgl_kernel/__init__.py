"""Stands in for SGLang's kernels for CPUs, which no package index has.

On a CPU without AMX, a text model needs one function, and imports some others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(
    requests: Any, pool: Any, starts: Any, ends: Any, locations: Any, _: int
) -> None:
    """Write the places of new tokens into the table of their requests."""
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[request, start:end] = locations[done : done + end - start]
        done += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(name)

    return missing
