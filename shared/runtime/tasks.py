"""Ends asyncio tasks reliably, and restarts background work that fails.

It also notices cancellations that redis-py would lose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_AGAIN_SECONDS = 1.0
_ANEW_SECONDS = 5.0
_log = logging.getLogger("promptq.tasks")  # a client has no other log


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end. Drops their exceptions.

    One cancellation is not enough. redis-py sends through `asyncio.wait_for`. Before Python 3.12,
    this function loses a cancellation that arrives when the sending is just done. An error while
    the task ends may also replace the cancellation.

    The caller may be cancelled too; anyio repeats this at every turn until a scope is left. `end`
    raises that cancellation only when all tasks have ended, because the caller often closes their
    resources next.
    """
    loop = asyncio.get_running_loop()
    cancelled: asyncio.CancelledError | None = None
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        again_at = loop.time() + _CANCEL_AGAIN_SECONDS
        while pending and (left := again_at - loop.time()) > 0:
            try:
                await asyncio.wait(pending, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
            pending = {task for task in pending if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()  # it counts as seen
    if cancelled is not None:
        raise cancelled


async def kept_up(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run background work until it returns. If it fails, log the error and restart it."""
    while True:
        try:
            return await work()
        except Exception:
            _log.exception("the background task %r failed, and begins anew", name)
        await asyncio.sleep(_ANEW_SECONDS)


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
