"""Runs long work on an event loop in slices, so that the work delays no other task.

Long work is a generator that yields None after each small part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
P = TypeVar("P")

Work = Generator[None, None, T]

SLICE_SECONDS = 0.001


class Turns:
    """Runs several pieces of long work by turns: one slice in each round of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def give_way(self) -> None:
        """Waits until this work may run its next slice: one slice in each round of the loop."""
        async with self._lock:
            await asyncio.sleep(0)

    async def run(self, steps: Work[T]) -> T:
        """Runs `steps` in slices, and returns its result."""
        result: list[T] = []
        for _ in _collecting(sliced(steps, None), result):
            await self.give_way()
        return result[0]


def sliced(steps: Work[T], pause: P) -> Generator[P, None, T]:
    """Runs `steps` and returns its result. Yields `pause` after each slice of `SLICE_SECONDS`."""
    result: list[T] = []
    until = time.perf_counter() + SLICE_SECONDS
    for _ in _collecting(steps, result):
        if time.perf_counter() > until:
            yield pause
            until = time.perf_counter() + SLICE_SECONDS
    return result[0]


def at_once(steps: Work[T]) -> T:
    """Runs `steps` without a pause, and returns its result."""
    result: list[T] = []
    for _ in _collecting(steps, result):
        pass
    return result[0]


def _collecting(steps: Generator[P, None, T], result: list[T]) -> Generator[P, None, None]:
    result.append((yield from steps))
