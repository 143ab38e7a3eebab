"""Listens on the channels of the queue: new work and cancels on `control`, drains on `drain`.

Producers may publish on `control`, but should not be able to end workers. If the server has no
roles, so that every client may do everything, a drain on `control` is heeded too, as earlier
releases send it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError

from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime.logs import get_logger

_RECONNECT_SECONDS = 0.5


class Message(NamedTuple):
    """`kind` is `pending`, `cancel` or `drain`; `name` is the id of a request or a worker."""

    kind: str
    name: str | None = None


async def messages(client: Any, keys: Keys) -> AsyncIterator[Message]:
    """Each message, until cancelled. A drain without a name is for all workers.

    Messages that are missed while disconnected only cost time: workers poll for new work, and every
    publish reports what is cancelled. Only a drain has to be sent again. The first message says
    that it listens. Raises NoPermissionError.
    """
    heeded = {keys.drain.encode()}
    if not _has_role(client):
        heeded.add(keys.control.encode())
    while True:
        try:
            async with client.pubsub() as channel:
                await channel.subscribe(keys.control, keys.drain)
                while True:
                    message = await _next(channel)
                    if message["type"] == "subscribe":
                        yield Message("pending")  # something may have come before it listened
                    if message["type"] != "message":
                        continue
                    kind, colon, name = message["data"].decode("ascii", "replace").partition(":")
                    if kind != "drain" or message["channel"] in heeded:
                        yield Message(kind, name if colon else None)
        except NoPermissionError:
            raise
        except (RedisError, OSError) as error:
            get_logger().warning("control channel lost, subscribing again", error=str(error))
            await asyncio.sleep(_RECONNECT_SECONDS)


def _has_role(client: Any) -> bool:
    """Whether this connection uses its own user, not the default one of the server."""
    user = client.connection_pool.connection_kwargs.get("username")
    return user not in (None, "", "default")


async def _next(channel: Any) -> dict[str, Any]:
    """The next message. If none comes, a ping is sent and its answer is the next message.

    Raises RedisError if that does not come either: the connection may be open and pass nothing.
    """
    seconds = channel.connection.socket_timeout
    message: dict[str, Any] | None = await channel.get_message(timeout=seconds)
    if message is None:
        await channel.ping()
        message = await channel.get_message(timeout=seconds)
    if message is None:
        raise RedisConnectionError(f"no answer for {seconds:g} s")
    return message
