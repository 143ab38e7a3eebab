"""Cancellation of asyncio tasks that redis-py would lose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def heeding_cancels(awaitable: Awaitable[T]) -> T:
    """Await, and raise CancelledError if the task was cancelled meanwhile.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation
    that arrives when the sending is just done; the task would then wait on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    value = await awaitable
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return value
