"""Notices when the client of an answer leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from promptq.producer.gateway.http.errors import ClientLeftError


class Presence:
    """Set `is_over` when all is sent: a client that leaves later interrupts nothing."""

    def __init__(self) -> None:
        self.is_over = False


@asynccontextmanager
async def while_present(receive: Receive) -> AsyncIterator[Presence]:
    """Interrupt the `with` block when the client leaves, and raise ClientLeftError."""
    presence, has_left = Presence(), False
    working = asyncio.current_task()
    assert working is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        if not presence.is_over:
            has_left = True
            working.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield presence
    except asyncio.CancelledError:
        if has_left and working.uncancel() == 0:
            raise ClientLeftError from None
        raise
    finally:
        presence.is_over = True
        watching.cancel()
