"""Gives requests back to the queue, with their progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from redis.exceptions import RedisError

from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.retry import keep_trying
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leases
from promptq.worker.telemetry.departures import Departures

_RETRY_SECONDS = 0.2


class GiveBack:
    """Gives back the leases that are due. Those that the server does not take stay held, are
    renewed, and are tried again."""

    def __init__(self, queue: AsyncRequestQueue, leases: Leases, departures: Departures) -> None:
        self._queue = queue
        self._leases = leases
        self._departures = departures
        self._turn = asyncio.Lock()  # so that no lease is given back twice
        self._log = get_logger(worker_id=queue.worker_id)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._leases.some_return.wait()
            try:
                await self.run_once()
            except (RedisError, OSError) as error:
                self._log.warning("requests not given back, trying again", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def run_once(self, seconds: float = 0.0) -> None:
        """Give back all leases that are due.

        Raises RedisError, OSError: the last error of the server, if it has taken nothing for
        `seconds`.
        """
        async with self._turn:
            due = self._leases.due_back
            for part in (
                [it for it in due if it.is_blamed],
                [it for it in due if not it.is_blamed and it.delay_ms is None],
                [it for it in due if not it.is_blamed and it.delay_ms is not None],
            ):
                if part:
                    await keep_trying(partial(self._release, part), seconds)
            if not self._leases.due_back:
                self._leases.some_return.clear()
        self._leases.feed()

    async def _release(self, leases: Sequence[Lease]) -> None:
        """Give some leases back. All of them are blamed or none is, and all have a delay or none
        has."""
        held = [lease.as_held() for lease in leases]
        delays_ms = [lease.delay_ms for lease in leases if lease.delay_ms is not None]
        crashed = leases[0].is_blamed
        statuses = await self._queue.release(held, crashed=crashed, delays_ms=delays_ms)
        for lease, status in zip(leases, statuses, strict=True):
            self._departures.note(lease, self._leases.released(lease, status))
