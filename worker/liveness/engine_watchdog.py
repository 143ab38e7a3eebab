"""Notices when the engine, or the preparation of a request, hangs."""

from __future__ import annotations

import asyncio

from promptq.shared.errors import PromptqError
from promptq.shared.runtime.logs import get_logger
from promptq.worker.engine_port import EnginePort
from promptq.worker.intake.prefetcher import Prefetcher

_LOOKS_PER_LIMIT = 8
_MAX_WATCH_SECONDS = 1.0


class EngineStuckError(PromptqError):
    """The engine, or the preparation of a request, has made no progress for so long that the
    worker gives everything back and ends."""


class EngineWatchdog:
    """A part counts as hung after it has made no progress for `seconds`."""

    def __init__(self, engine: EnginePort, prefetcher: Prefetcher, seconds: float) -> None:
        self.seconds = seconds
        self._engine = engine
        self._prefetcher = prefetcher

    @property
    def is_in_engine(self) -> bool:
        return self._engine.seconds_without_progress() > self.seconds

    @property
    def reason(self) -> str:
        """The part that hangs; empty if none does."""
        if self._prefetcher.hangs_on is not None:
            return "the preparation of a request"
        return "the engine" if self.is_in_engine else ""

    async def watch(self) -> None:
        """Wait until a part hangs. Raises EngineStuckError then."""
        while True:
            await asyncio.sleep(min(self.seconds / _LOOKS_PER_LIMIT, _MAX_WATCH_SECONDS))
            if what := self.reason:
                lease = self._prefetcher.hangs_on
                of = {} if lease is None else {"request_id": lease.request_id}
                get_logger().error(f"{what} hangs; giving everything back", **of)
                raise EngineStuckError(f"{what} has made no progress for {self.seconds:g} s")
