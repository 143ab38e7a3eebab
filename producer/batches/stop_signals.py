"""Tells a run of a batch that its process was told to stop."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress


def stop_signals() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set, if the event loop runs in the main thread."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(RuntimeError, ValueError):  # loops in other threads hear no signals
            loop.add_signal_handler(number, stopped.set)
    return stopped
