"""The events of a completion's choices, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from producer.async_client import AsyncClient
from shared.events import TokenEvent

Indexed = tuple[int, TokenEvent]

_MAX_UNSENT = 256
"""So many events wait for a client that reads slowly; the others wait in the server's logs."""


def events_of(client: AsyncClient, request_ids: Sequence[str]) -> AsyncGenerator[Indexed, None]:
    """Each event with the place of its request. Raises what a stream of the client raises."""
    if len(request_ids) == 1:
        return _of_one(client, request_ids[0])
    return _of_many(client, request_ids)


async def _of_one(client: AsyncClient, request_id: str) -> AsyncGenerator[Indexed, None]:
    async with aclosing(client.stream(request_id)) as events:
        async for event in events:
            yield 0, event


async def _of_many(
    client: AsyncClient, request_ids: Sequence[str]
) -> AsyncGenerator[Indexed, None]:
    """One task a request; the first error ends all."""
    heard: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(maxsize=_MAX_UNSENT)

    async def listen(index: int, request_id: str) -> None:
        try:
            async with aclosing(client.stream(request_id)) as events:
                async for event in events:
                    await heard.put((index, event))
        except Exception as error:
            await heard.put(error)
        else:
            await heard.put(None)

    tasks = [asyncio.create_task(listen(*it)) for it in enumerate(request_ids)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await heard.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
