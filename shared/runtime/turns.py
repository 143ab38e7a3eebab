"""Long work on an event loop, in slices so that it delays no other task.

Long work is written as a generator that yields None after each small part.
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
    """Does one slice of an owner's long work in each round of the loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def give_way(self) -> None:
        """Wait for the next turn."""
        async with self._lock:
            await asyncio.sleep(0)

    async def run(self, steps: Work[T]) -> T:
        """Do the work, and return its result."""
        slices = sliced(steps, None)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                value: T = end.value
                return value
            await self.give_way()


def sliced(steps: Work[T], pause: P) -> Generator[P, None, T]:
    """Do the work, and yield `pause` after each slice of it."""
    until = time.perf_counter() + SLICE_SECONDS
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        if time.perf_counter() > until:
            yield pause
            until = time.perf_counter() + SLICE_SECONDS


def at_once(steps: Work[T]) -> T:
    """Do all of the work now, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
