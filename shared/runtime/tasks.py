"""Ends asyncio tasks reliably, and restarts background work that fails.

Also detects cancellations that redis-py would lose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_AGAIN_SECONDS = 1.0
_ANEW_SECONDS = 5.0
_log = logging.getLogger("promptq.tasks")  # clients may lack structlog


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits until they have ended. Drops their exceptions.

    One cancellation may not be enough. redis-py sends through `asyncio.wait_for`, which before
    Python 3.12 loses a cancellation that arrives when the send has just finished. An error while
    the task ends may also replace the cancellation.

    If the caller is cancelled during the wait, `end` raises CancelledError only after all tasks
    have ended: callers often close the tasks' resources next.
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
            task.exception()  # marks the exception as retrieved
    if cancelled is not None:
        raise cancelled


async def kept_up(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Runs `work` until a run returns without an error. Logs each error, and runs `work` again."""
    while True:
        try:
            return await work()
        except Exception:
            _log.exception("the background task %r failed and is restarted", name)
        await asyncio.sleep(_ANEW_SECONDS)


async def heeding_cancels(awaitable: Awaitable[T]) -> T:
    """Awaits `awaitable`. Raises CancelledError if the task was cancelled during the wait.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
    arrives when the send has just finished. The task would then continue to wait.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    value = await awaitable
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return value
