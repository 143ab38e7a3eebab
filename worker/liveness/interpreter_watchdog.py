"""Ends a process whose interpreter hangs, which no code inside it can notice.

Code that keeps the lock of the interpreter (a regular expression that never ends, a C extension)
stops every thread, also the one that renews leases and watches the engine. `faulthandler` watches
from a thread that needs no lock. It writes the stack of each thread to standard error, and exits
with 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from promptq.shared.runtime.tasks import end

_GRACE = 1.25  # leaves time to end in good order if the engine hangs without the lock
_SIGNS_OF_LIFE = 8


@asynccontextmanager
async def watched(seconds: float) -> AsyncIterator[None]:
    """End the process once this event loop has not run for 1.25 times `seconds`."""
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
