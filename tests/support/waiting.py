"""Waits for conditions without a time limit, and has a clock that a test sets."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


def _pause(began: float) -> float:
    """Returns the seconds until the next check. Pauses grow, because each check takes CPU time, and
    some conditions wait for the start of a process."""
    return min(0.01, max(0.002, (time.monotonic() - began) / 50))


def until(condition: Callable[[], Any]) -> Any:
    """Waits until `condition` returns a true value, and returns this value."""
    began = time.monotonic()
    while not (value := condition()):
        time.sleep(_pause(began))
    return value


async def async_until(condition: Callable[[], Any]) -> Any:
    """Waits like `until`, but other tasks run meanwhile. `condition` may return an awaitable."""
    began = time.monotonic()
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(_pause(began))


class Clock:
    """A clock that returns `now`, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
