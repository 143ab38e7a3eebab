"""Listens on the queue's control channel: new work, and requests that were cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared import scripts
from shared.keys import Keys, is_request_id
from shared.logs import get_logger
from shared.request_queue import AsyncRequestQueue
from worker.leases import Leases
from worker.publisher import Publisher

_RECONNECT_SECONDS = 0.5


async def listen(
    client: Any,
    keys: Keys,
    on_pending: Callable[[], None],
    on_cancel: Callable[[str], None],
    on_drain: Callable[[str | None], None],
) -> None:
    """Tell of each message until cancelled. `on_drain` gets the worker's id, None for all.

    Messages that are missed while disconnected cost only time: workers poll for new work, and every
    publish answers with what is cancelled. Only a drain is to be sent again.
    """
    while True:
        try:
            async with client.pubsub() as channel:
                await channel.subscribe(keys.control)
                while True:
                    message = await _next(channel)
                    if message["type"] == "subscribe":
                        on_pending()  # it listens from now on; something may have come before
                    if message["type"] != "message":
                        continue
                    kind, colon, name = message["data"].partition(b":")
                    if kind == b"pending":
                        on_pending()
                    elif kind == b"cancel":
                        on_cancel(name.decode("ascii", "replace"))
                    elif kind == b"drain":
                        on_drain(name.decode("ascii", "replace") if colon else None)
        except (RedisError, OSError) as error:
            get_logger().warning("control channel lost, subscribing again", error=str(error))
            await asyncio.sleep(_RECONNECT_SECONDS)


async def _next(channel: Any) -> dict[str, Any]:
    """What comes next, if only the answer to a ping that is sent into silence.

    Raises RedisError if that does not come either: the link may stand and pass nothing.
    """
    seconds = channel.connection.socket_timeout
    message: dict[str, Any] | None = await channel.get_message(timeout=seconds)
    if message is None:
        await channel.ping()
        message = await channel.get_message(timeout=seconds)
    if message is None:
        raise RedisConnectionError(f"no answer for {seconds:g} s")
    return message


class Cancels:
    """Carries out cancels. The flag in the request is the truth; a message only points at it."""

    def __init__(self, queue: AsyncRequestQueue, leases: Leases, publisher: Publisher) -> None:
        self._queue = queue
        self._leases = leases
        self._publisher = publisher
        self._ids: set[str] = set()
        self._arrived = asyncio.Event()

    def add(self, request_id: str) -> None:
        """Anybody may have sent it: what cannot be an id, however long, is not asked after."""
        if is_request_id(request_id):
            self._ids.add(request_id)
            self._arrived.set()

    async def run_once(self) -> None:
        """Wait for cancels and carry them out.

        If that fails they wait no longer than a renewal of the leases, which tells of them too.
        """
        await self._arrived.wait()
        self._arrived.clear()
        ids, self._ids = self._ids, set()
        held = [item for item in map(self._leases.by_request, ids) if item is not None]
        if held:
            await self._publisher.renew(held)
        if others := sorted(ids - {item.request_id for item in held}):
            await self._queue.run(scripts.cancel(others, "flagged"))
