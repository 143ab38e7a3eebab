"""Options of a batch run, its progress, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from promptq.producer.admin.api_keys import ApiKey


class Ending(StrEnum):
    """Why a run ended. Each value except `stopped` is also a final status of a batch."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STOPPED = "stopped"
    """The process had to stop before the batch ended. Another process may continue the run."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Numbers of lines: `completed` lines are in the output, `failed` lines in the error file."""

    total: int
    completed: int
    failed: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class RunOptions:
    endpoint: str | None = None
    """The URL that all lines must have; None if lines may have any supported URL."""
    max_in_flight: int = 128
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default fields of each request; a line may override them."""
    caller: ApiKey | None = None
    """The key whose rights limit the lines; None: no limits."""
    fetch: Callable[[Sequence[str], str], Awaitable[Mapping[str, str]]] | None = None
    """Maps the URLs or file ids of a field's pictures to data URLs. None: no pictures are
    fetched."""
    expires_at: float | None = None
    """Unix time in seconds at which the batch and its requests expire; None: never."""
    retry_seconds: float = 60.0
    """Seconds for which calls are repeated while the server does not answer."""


def stop_signals(pipe: int | None = None) -> asyncio.Event:
    """Returns an event that is set by SIGINT, by SIGTERM, or when the other end of `pipe` closes.

    Threads and forked processes use `pipe`: only the main thread's event loop surely gets signals.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(RuntimeError, ValueError):  # event loops in other threads get no signals
            loop.add_signal_handler(number, stopped.set)
    if pipe is not None:

        def stop() -> None:
            stopped.set()
            loop.remove_reader(pipe)

        loop.add_reader(pipe, stop)
    return stopped
