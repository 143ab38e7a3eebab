"""How a run of a batch hears that its process is to end."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress


def stop_signals() -> asyncio.Event:
    """Set by SIGINT or SIGTERM while the running event loop lives, in the main thread."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(RuntimeError, ValueError):  # another thread's loop hears no signals
            loop.add_signal_handler(number, stopped.set)
    return stopped
