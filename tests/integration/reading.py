"""The same with either client, from a thread beside the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from promptq import AsyncClient, Client
from promptq.shared.protocol.events import TokenEvent

KINDS = ["sync", "async"]


def read_in(
    kind: str,
    url: str,
    request_id: str,
    told: Callable[[TokenEvent], Any] = lambda event: None,
    **options: Any,
) -> str:
    """The text of a stream; `told` gets each event as it comes. `options` are the client's."""

    async def read() -> str:
        async with AsyncClient(url, **options) as client:
            text = ""
            async for event in client.stream(request_id):
                told(event)
                text += event.text
            return text

    if kind == "async":
        return asyncio.run(read())
    with Client(url, **options) as client:
        text = ""
        for event in client.stream(request_id):
            told(event)
            text += event.text
        return text


def enqueue_in(kind: str, url: str, **fields: Any) -> str:
    """The id of a request that was put into the queue."""

    async def enqueue() -> str:
        async with AsyncClient(url) as client:
            return await client.enqueue("a", **fields)

    if kind == "async":
        return asyncio.run(enqueue())
    with Client(url) as client:
        return client.enqueue("a", **fields)
