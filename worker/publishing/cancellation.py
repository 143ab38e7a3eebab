"""Carries out the cancels that the control channel tells of."""

from __future__ import annotations

import asyncio

from promptq.shared.protocol.keys import is_request_id
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.leases.leases import Leases
from promptq.worker.publishing.publisher import Publisher


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
