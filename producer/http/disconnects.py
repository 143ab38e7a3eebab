"""Notices that a client leaves before its answer is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.types import Receive

from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.errors import ClientLeftError
from promptq.producer.http.state import Gateway


class Answer(Protocol):
    """An answer that its client waits for."""

    @property
    def request_ids(self) -> list[str]: ...
    @property
    def detach(self) -> bool:
        """Whether the requests continue when the client leaves."""


class Presence:
    """Set `is_over` when all is sent: a client that leaves later interrupts nothing."""

    def __init__(self) -> None:
        self.is_over = False


@asynccontextmanager
async def cancelled_if_client_leaves(
    gateway: Gateway,
    receive: Receive,
    served: ServedQueue,
    answer: Answer,
    *,
    errors: tuple[type[Exception], ...] = (),
) -> AsyncIterator[Presence]:
    """Interrupt the `with` block when the client leaves, and raise ClientLeftError.

    Cancels the requests of the answer then, unless the client detached, and after each of `errors`.
    """
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
            if not answer.detach:
                gateway.cancels.cancel(served.client, answer.request_ids)
            raise ClientLeftError from None
        raise
    except errors:
        gateway.cancels.cancel(served.client, answer.request_ids)
        raise
    finally:
        presence.is_over = True
        watching.cancel()
