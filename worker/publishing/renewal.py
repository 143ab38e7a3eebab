"""Renews leases, which is also how a worker hears what became of requests that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leases
from promptq.worker.telemetry.departures import Departures


class Renewal:
    """Tells exact lengths of prompts too."""

    def __init__(self, queue: AsyncRequestQueue, leases: Leases, departures: Departures) -> None:
        self._queue = queue
        self._leases = leases
        self._departures = departures

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Renew; let go of what is cancelled, expired or not ours any more.

        Raises RedisError, OSError.
        """
        held = [lease.as_held() for lease in leases]
        published = await self._queue.publish([], held)
        for lease, told, status in zip(leases, held, published.held, strict=True):
            lease.told(told)
            self._departures.note(lease, self._leases.answered(lease, status))
        self._leases.feed()
