"""Which of the gateway's queues a page shows."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from promptq.producer.gateway.context.gateway import ThisGateway
from promptq.producer.gateway.context.served_queues import ServedQueue


async def shown_queue(gateway: ThisGateway, queue: str = "") -> ServedQueue:
    """The queue that the query names; without a name the gateway's own. Raises ApiError 404."""
    return await gateway.queues.named(queue)


ThisQueue = Annotated[ServedQueue, Depends(shown_queue)]
"""A route's parameter of this type is the queue that its page shows."""
