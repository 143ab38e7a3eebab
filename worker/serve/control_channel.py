"""Listens on the pub/sub channels of the queue: `control` for new work and cancels, `drain` for
messages that tell workers to finish and exit.

Producers may publish on `control`, but must not be able to end workers. So drains have a separate
channel. On a server without roles, every client may publish everywhere. On such a server, the
worker also obeys a drain on `control`, because earlier releases send drains there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError

from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import get_logger
from promptq.shared.server.retry import note_failure
from promptq.worker.leases.exchange import Exchange
from promptq.worker.leases.ready import WakeUp

_RECONNECT_SECONDS = 0.5


async def act(
    messages: AsyncIterator[str],
    queue: AsyncRequestQueue,
    wake_up: WakeUp,
    exchange: Exchange,
    drain: asyncio.Event,
) -> None:
    """Act on messages until this task is cancelled. Passes new work to `wake_up`, and cancels of
    requests to `exchange`. Sets `drain` when a message tells this worker to finish and exit.

    A message is `pending`, `cancel:ID`, `drain` for all workers, or `drain:WORKER_ID`.
    """
    async for message in messages:
        kind, colon, name = message.partition(":")
        if kind == "pending":
            wake_up.work_came()
        elif kind == "cancel":
            exchange.cancel(name)
        elif kind == "drain" and not drain.is_set() and (not colon or name == queue.worker_id):
            log = get_logger(worker_id=queue.worker_id, queue=queue.keys.queue)
            log.info("a message orders a drain")
            drain.set()


async def listen(queue: AsyncRequestQueue) -> AsyncIterator[str]:
    """Yields the messages until this task is cancelled. Yields `pending` after each connection.

    The worker misses messages while it is disconnected. Missed wake-ups and cancels only cost time:
    workers poll for new work, and every publish reports cancels. A missed drain has to be sent
    again. Raises NoPermissionError.
    """
    client, keys = queue.redis, queue.keys
    heeded = {keys.drain.encode()}
    if client.connection_pool.connection_kwargs.get("username") in (None, "", "default"):
        heeded.add(keys.control.encode())  # the worker has no role
    while True:
        try:
            async with client.pubsub() as channel:
                await channel.subscribe(keys.control, keys.drain)
                while True:
                    message = await _next(channel)
                    if message["type"] == "subscribe":
                        yield "pending"  # messages before this were missed
                    if message["type"] != "message":
                        continue
                    text = message["data"].decode("ascii", "replace")
                    if message["channel"] in heeded or text.partition(":")[0] != "drain":
                        yield text
        except NoPermissionError:
            raise
        except (RedisError, OSError) as error:
            note_failure(error)
            await asyncio.sleep(_RECONNECT_SECONDS)


async def _next(channel: Any) -> dict[str, Any]:
    """Returns the next message, or the answer to a ping if no message comes for some seconds.
    Raises RedisError if the ping gets no answer: the connection is then open but dead."""
    seconds = channel.connection.socket_timeout
    message: dict[str, Any] | None = await channel.get_message(timeout=seconds)
    if message is None:
        await channel.ping()
        message = await channel.get_message(timeout=seconds)
    if message is None:
        raise RedisConnectionError(f"no answer for {seconds:g} s")
    return message
