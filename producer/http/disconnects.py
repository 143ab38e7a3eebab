"""Cancels requests whose client disconnects before its answer is complete."""

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
    """An answer to a client that is still connected."""

    @property
    def request_ids(self) -> list[str]: ...
    @property
    def detach(self) -> bool:
        """Whether the requests continue after their client has disconnected."""


@asynccontextmanager
async def cancelled_if_client_leaves(
    gateway: Gateway,
    receive: Receive,
    served: ServedQueue,
    answer: Answer,
    *,
    errors: tuple[type[Exception], ...] = (),
) -> AsyncIterator[asyncio.Event]:
    """Context manager around the work for an answer. If the client disconnects, interrupts the
    work, cancels the answer's requests unless `answer.detach` is true, and raises ClientLeftError.

    The requests are also cancelled if the work raises one of `errors`. Work that sends the answer
    must set the yielded event after the last byte. After that, a disconnection has no effect.
    """
    is_sent, has_left = asyncio.Event(), False
    working = asyncio.current_task()
    assert working is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        if not is_sent.is_set():
            has_left = True
            working.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield is_sent
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
        is_sent.set()
        watching.cancel()
