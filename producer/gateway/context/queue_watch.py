"""A queue as a gateway must know it to take requests, read at most once a second."""

from __future__ import annotations

import asyncio
import time

from promptq.producer.admin.queue_views import QueueView, queue_view
from promptq.shared.queue.call import carry_out_async
from promptq.shared.queue.request_queue import AsyncRequestQueue

_FRESH_SECONDS = 1.0


class QueueWatch:
    """Reads the view when it is asked for. Raises redis.RedisError if the server is away."""

    def __init__(self, queue: AsyncRequestQueue) -> None:
        self.num_sent = 0
        """Requests that were sent to the queue since it was looked at."""
        self._queue = queue
        self._seen: QueueView | None = None
        self._seen_at = float("-inf")
        self._looking = asyncio.Lock()

    @property
    def is_old(self) -> bool:
        """Whether it is read anew at the next look."""
        return time.monotonic() - self._seen_at > _FRESH_SECONDS

    async def look(self, *, now: bool = False) -> QueueView:
        """The queue as it was at most a second ago; with `now`, as it is now."""
        async with self._looking:
            if self._seen is None or self.is_old or now:
                self._seen = await carry_out_async(queue_view(self._queue.keys), self._queue.run)
                self._seen_at = time.monotonic()
                self.num_sent = 0
            return self._seen
