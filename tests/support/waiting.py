"""Waits for conditions, however long that takes; and a clock that a test sets."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any]) -> Any:
    """Waits until a condition is true, and returns its value."""
    while not (value := condition()):
        time.sleep(0.002)
    return value


async def async_until(condition: Callable[[], Any]) -> Any:
    """Waits like `until` beside other tasks; the condition may return an awaitable."""
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.002)


class Clock:
    """A clock that returns `now`, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
