"""The timer that renews leases while the worker makes progress."""

from __future__ import annotations

import asyncio

from redis.exceptions import RedisError

from promptq.shared.runtime.logs import get_logger
from promptq.worker.leases.leases import Leases
from promptq.worker.liveness.engine_watchdog import EngineWatchdog
from promptq.worker.publishing.publisher import Publisher

_RENEWALS_PER_LEASE = 4


class LeaseTimer:
    """Renews all leases several times within a lease, as long as there is progress."""

    def __init__(
        self, leases: Leases, publisher: Publisher, watchdog: EngineWatchdog, lease_ms: int
    ) -> None:
        self._leases = leases
        self._publisher = publisher
        self._watchdog = watchdog
        self._interval = lease_ms / 1000 / _RENEWALS_PER_LEASE

    async def run(self) -> None:
        """Run until cancelled."""
        log = get_logger()
        while True:
            await asyncio.sleep(self._interval)
            try:
                if self._watchdog.reason:
                    log.error("no progress; leases are left to run out", held=len(self._leases))
                elif held := list(self._leases):
                    await self._publisher.renew(held)
            except (RedisError, OSError) as error:
                log.warning("leases not renewed", error=str(error))
