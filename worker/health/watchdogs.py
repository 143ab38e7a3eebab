"""Watches the engine and the interpreter, and renews leases while the worker makes progress.

Code that never releases the interpreter's lock (an endless regular expression, a C extension) stops
every thread. It also stops the main thread, which renews leases and watches the engine. So
`faulthandler` watches from a thread that needs no lock. If the process hangs, that thread writes
the stack of each thread to standard error, and ends the process with status 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import RedisError

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tasks import end
from promptq.shared.server.retry import note_failure
from promptq.worker.engine.api.port import EnginePort
from promptq.worker.leases.exchange import Exchange
from promptq.worker.leases.held_and_lost_leases import Leases
from promptq.worker.leases.prefetcher import Prefetcher

_LOOKS_PER_LIMIT = 8
_MAX_WATCH_SECONDS = 1.0
_RENEWALS_PER_LEASE = 4
_GRACE = 1.25  # if only the engine hangs, EngineWatchdog acts first and the worker ends in order


class EngineStuckError(PromptqError):
    """Raised if the engine, or the preparation of a request, makes no progress. Then the worker
    gives all requests back to the queue and ends."""


class EngineWatchdog:
    """Checks whether a part of the worker hangs: the engine, or the preparation of a request. The
    engine hangs if it makes no progress for `seconds`."""

    def __init__(self, engine: EnginePort, prefetcher: Prefetcher, seconds: float) -> None:
        self.seconds = seconds
        self._engine = engine
        self._prefetcher = prefetcher

    @property
    def engine_hangs(self) -> bool:
        return self._engine.seconds_without_progress() > self.seconds

    @property
    def reason(self) -> str:
        """The name of the part that hangs; empty if no part hangs."""
        if self._prefetcher.hangs_on is not None:
            return "the preparation of a request"
        return "the engine" if self.engine_hangs else ""

    async def watch(self) -> None:
        """Wait until a part hangs, and then raise EngineStuckError."""
        while True:
            await asyncio.sleep(min(self.seconds / _LOOKS_PER_LIMIT, _MAX_WATCH_SECONDS))
            if what := self.reason:
                lease = self._prefetcher.hangs_on
                of = {} if lease is None else {"request_id": lease.request_id}
                get_logger().error(f"{what} hangs; giving all requests back", **of)
                raise EngineStuckError(f"{what} has made no progress for {self.seconds:g} s")


async def renew_leases(
    leases: Leases, exchange: Exchange, watchdog: EngineWatchdog, lease_ms: int
) -> None:
    """Renew all leases four times within `lease_ms`, but not while `watchdog` reports a hang.
    Never returns. Logs errors of Redis."""
    log = get_logger()
    while True:
        await asyncio.sleep(lease_ms / 1000 / _RENEWALS_PER_LEASE)
        try:
            if watchdog.reason:
                log.error("no progress; leases are no longer renewed", held=len(leases))
            elif held := list(leases):
                await exchange.renew(held)
        except (RedisError, OSError) as error:
            note_failure(error)


@asynccontextmanager
async def watched(seconds: float) -> AsyncIterator[None]:
    """Inside this context, the process ends if the event loop hangs for 1.25 times `seconds`."""
    restarting = asyncio.create_task(_restart_timer(seconds))
    try:
        yield
    finally:
        await end([restarting])
        faulthandler.cancel_dump_traceback_later()


async def _restart_timer(seconds: float) -> None:
    while True:
        faulthandler.dump_traceback_later(seconds * _GRACE, exit=True)
        await asyncio.sleep(min(_MAX_WATCH_SECONDS, seconds / _LOOKS_PER_LIMIT))
