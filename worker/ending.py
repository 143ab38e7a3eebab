"""Ends tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

_CANCEL_AGAIN_SECONDS = 1.0


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end; what they raise is dropped.

    One cancellation is not enough: `asyncio.wait_for` swallows it before Python 3.12 if what it
    waits for is just done (redis-py sends through it), and an error in the way out may replace it.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)  # their exceptions count as seen
