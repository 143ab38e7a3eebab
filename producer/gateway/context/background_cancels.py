"""Cancels requests whose HTTP client has left, in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from promptq.producer.clients.async_client import AsyncClient
from promptq.shared.errors import RedisSideError
from promptq.shared.queue.spoilt import alone
from promptq.shared.runtime.logs import get_logger

_TRY_SECONDS = 60.0
_PAUSE_SECONDS = 0.5
_LAST_SECONDS = 2.0


class BackgroundCancels:
    """Each call runs in its own task. If the server is away, it tries again for a minute."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger()

    def cancel(self, client: AsyncClient, request_ids: Sequence[str]) -> None:
        """End these requests of a client's queue soon."""
        task = asyncio.create_task(self._cancel(client, list(request_ids)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Give the cancels that are under way a little time to finish."""
        tasks: Iterable[asyncio.Task[None]] = self._tasks.copy()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for task in tasks:
            task.cancel()

    async def _cancel(self, client: AsyncClient, request_ids: list[str]) -> None:
        deadline = asyncio.get_running_loop().time() + _TRY_SECONDS
        while request_ids:
            try:
                with alone(f"request {request_ids[-1]}"):
                    await client.cancel(request_ids[-1])
                request_ids.pop()
            except RedisSideError as error:
                if asyncio.get_running_loop().time() > deadline:
                    self._log.warning("not cancelled", request_ids=request_ids, error=str(error))
                    return
                await asyncio.sleep(_PAUSE_SECONDS)
