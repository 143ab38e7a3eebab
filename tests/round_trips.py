"""Counts how often programs of this process turn to a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import redis.asyncio.connection
import redis.connection


@contextmanager
def counted_round_trips() -> Iterator[list[Any]]:
    """What was sent within, one item for each time that somebody then waits for an answer."""
    sent: list[Any] = []
    send = redis.connection.AbstractConnection.send_packed_command
    send_async = redis.asyncio.connection.AbstractConnection.send_packed_command

    def counting(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        sent.append(command)
        return send(connection, command, *args, **options)

    async def counting_async(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        sent.append(command)
        return await send_async(connection, command, *args, **options)

    with (
        patch.object(redis.connection.AbstractConnection, "send_packed_command", counting),
        patch.object(
            redis.asyncio.connection.AbstractConnection, "send_packed_command", counting_async
        ),
    ):
        yield sent
