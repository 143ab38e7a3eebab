"""The state of one gateway process, which all of its routes share."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from redis.exceptions import RedisError

from promptq.producer.admin import api_keys
from promptq.producer.batch_store.file_quotas import FileQuotas
from promptq.producer.calls.call_reader import CallReader
from promptq.producer.calls.picture_urls import PictureFetcher
from promptq.producer.calls.queues import ServedQueues
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.http.bodies import BodyBudget
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.errors import RedisSideError
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.queue.spoilt import errors_logged
from promptq.shared.runtime.logs import get_logger

_EVERY_SECONDS = 60.0
"""The shortest time in seconds between two records of an API key's use."""
_MOST_SECONDS = 1.0
"""The longest delay of a refusal, in seconds. A delayed call uses only its connection."""
_TRY_SECONDS = 60.0
_PAUSE_SECONDS = 0.5
_LAST_SECONDS = 2.0
"""The most seconds that a stopping gateway waits for its background tasks to cancel requests."""


class KeyUses:
    """Stores in the queue when each API key was last used."""

    def __init__(self, queue: AsyncRequestQueue) -> None:
        self._queue = queue
        self._noted: dict[str, float] = {}

    async def note(self, secret: str) -> None:
        """Records the use of a key, at most once a minute. Ignores an unreachable server."""
        hashed, now = api_keys.hash_of(secret), time.monotonic()
        if now - self._noted.get(hashed, -math.inf) < _EVERY_SECONDS:
            return
        self._noted[hashed] = now
        call = api_keys.note_use(self._queue.keys, secret, int(time.time() * 1000))
        with suppress(RedisError, RedisSideError):
            await self._queue.run(call)


class Refusals:
    """Delays the refusals of callers that exceeded a rate and call again too early."""

    def __init__(self) -> None:
        self._may_come_at: dict[str, float] = {}

    async def refuse(self, name: str, wait_ms: int) -> int:
        """Waits at most a second if the key of this name calls again too early. `wait_ms` is the
        time until the key may call again. Returns the rest of this time after the wait, in ms."""
        now = time.monotonic()
        early = self._may_come_at.get(name, 0.0) - now
        self._may_come_at[name] = now + wait_ms / 1000
        if early <= 0:
            return wait_ms
        seconds = min(early, _MOST_SECONDS)
        await asyncio.sleep(seconds)
        return max(1, wait_ms - int(seconds * 1000))


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process: its settings, the queues that it serves, and its state in memory."""

    settings: GatewaySettings
    queues: ServedQueues
    redis_user: str
    """The name of the gateway's user at the Redis server."""
    call_reader: CallReader
    cancels: BackgroundCancels
    bodies: BodyBudget
    """The limit for bytes of calls' bodies in memory."""
    uploads: BodyBudget
    """The limit for bytes of uploaded files that are not complete yet."""
    file_quotas: FileQuotas
    key_uses: KeyUses
    refusals: Refusals
    pictures: PictureFetcher

    @property
    def client(self) -> AsyncClient:
        """The client of the gateway's own queue."""
        return self.queues.own.client

    @property
    def queue(self) -> AsyncRequestQueue:
        """The gateway's own queue, which holds API keys, files and batches."""
        return self.queues.own.queue

    @property
    def keys(self) -> Keys:
        return self.queue.keys


def gateway_of(request: Request) -> Gateway:
    """Returns the gateway that serves an HTTP request."""
    return cast(Gateway, request.app.state.gateway)


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
"""Type of a route's parameter that receives the gateway."""


class BackgroundCancels:
    """Cancels requests in background tasks. If the server is down, each task tries for a minute."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger()

    def cancel(self, client: AsyncClient, request_ids: Sequence[str]) -> None:
        """Starts a task that cancels these requests of a client's queue."""
        task = asyncio.create_task(self._cancel(client, list(request_ids)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Waits a short time for the tasks, and cancels the tasks that still run."""
        tasks: Iterable[asyncio.Task[None]] = self._tasks.copy()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for task in tasks:
            task.cancel()

    async def _cancel(self, client: AsyncClient, request_ids: list[str]) -> None:
        deadline = asyncio.get_running_loop().time() + _TRY_SECONDS
        while request_ids:
            try:
                with errors_logged(f"request {request_ids[-1]}"):
                    await client.cancel(request_ids[-1])
                request_ids.pop()
            except RedisSideError as error:
                if asyncio.get_running_loop().time() > deadline:
                    self._log.warning("not cancelled", request_ids=request_ids, error=str(error))
                    return
                await asyncio.sleep(_PAUSE_SECONDS)
