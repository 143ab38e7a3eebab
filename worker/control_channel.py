"""Listens on the queue's control channel: new work, cancels and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime.logs import get_logger

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
