"""Ends a process whose interpreter hangs, which nothing inside it can notice.

Code that keeps the interpreter's lock (a regular expression that never ends, an extension in C)
stops every thread, the one that renews leases and looks after the engine too. `faulthandler`
watches from a thread that needs no lock; it writes where each thread stands to standard error and
exits with 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from promptq.shared.runtime.tasks import end

_GRACE = 1.25  # an engine that hangs without the lock is ended in good order before
_SIGNS_OF_LIFE = 8


@asynccontextmanager
async def watched(seconds: float) -> AsyncIterator[None]:
    """End the process once this event loop has not run for `seconds` and a quarter more."""
    showing_life = asyncio.create_task(_show_life(seconds))
    try:
        yield
    finally:
        await end([showing_life])
        faulthandler.cancel_dump_traceback_later()


async def _show_life(seconds: float) -> None:
    while True:
        faulthandler.dump_traceback_later(seconds * _GRACE, exit=True)
        await asyncio.sleep(min(1.0, seconds / _SIGNS_OF_LIFE))
