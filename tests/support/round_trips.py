"""Counts how often a test turns to a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import redis.asyncio.connection
import redis.connection


@contextmanager
def counted_round_trips() -> Iterator[list[Any]]:
    """What this thread sends within, one item for each time that somebody waits for an answer.

    A gateway that lasts over many tests sends in a thread of its own.
    """
    sent: list[Any] = []
    own = threading.get_ident()
    send = redis.connection.AbstractConnection.send_packed_command
    send_async = redis.asyncio.connection.AbstractConnection.send_packed_command

    def note(command: Any) -> None:
        if threading.get_ident() == own:
            sent.append(command)

    def counting(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        note(command)
        return send(connection, command, *args, **options)

    async def counting_async(connection: Any, command: Any, *args: Any, **options: Any) -> Any:
        note(command)
        return await send_async(connection, command, *args, **options)

    with (
        patch.object(redis.connection.AbstractConnection, "send_packed_command", counting),
        patch.object(
            redis.asyncio.connection.AbstractConnection, "send_packed_command", counting_async
        ),
    ):
        yield sent
