"""Cancels requests that this worker holds, and gives requests back to the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from redis.exceptions import RedisError

from promptq.shared.protocol.keys import is_request_id
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.retry import keep_trying
from promptq.worker.leases.exits import Departures
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Leases
from promptq.worker.leases.publisher import Publisher

_RETRY_SECONDS = 0.2


class Cancellation:
    """Carries out cancels. The flag in the request decides; a message only says where to look."""

    def __init__(self, queue: AsyncRequestQueue, leases: Leases, publisher: Publisher) -> None:
        self._queue = queue
        self._leases = leases
        self._publisher = publisher
        self._ids: set[str] = set()
        self._arrived = asyncio.Event()

    def add(self, request_id: str) -> None:
        """Note a cancel. Anybody may have sent it, so what cannot be an id is ignored."""
        if is_request_id(request_id):
            self._ids.add(request_id)
            self._arrived.set()

    async def run_once(self) -> None:
        """Wait for cancels and carry them out.

        If that fails, the next renewal of the leases notices them anyway.
        """
        await self._arrived.wait()
        self._arrived.clear()
        ids, self._ids = self._ids, set()
        held = [item for item in map(self._leases.by_request, ids) if item is not None]
        if held:
            await self._publisher.renew(held)
        if others := sorted(ids - {item.request_id for item in held}):
            await self._queue.run(scripts.cancel(others, "flagged"))


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
