"""What all routes of one gateway share, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from promptq.producer.batch_store.file_quotas import FileQuotas
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.gateway.context.background_cancels import BackgroundCancels
from promptq.producer.gateway.context.key_uses import KeyUses
from promptq.producer.gateway.context.queue_view import QueueWatch
from promptq.producer.gateway.context.refusals import Refusals
from promptq.producer.gateway.http.body_budget import BodyBudget
from promptq.producer.settings import GatewaySettings
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.request_queue import AsyncRequestQueue


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process: its settings, its client of the queue, and what it keeps in memory."""

    settings: GatewaySettings
    client: AsyncClient
    redis_user: str
    """The user that the Redis server knows it as."""
    watch: QueueWatch
    cancels: BackgroundCancels
    bodies: BodyBudget
    """The budget for bodies in memory."""
    uploads: BodyBudget
    """The budget for uploads on their way to the disk."""
    file_quotas: FileQuotas
    key_uses: KeyUses
    refusals: Refusals

    @property
    def queue(self) -> AsyncRequestQueue:
        """For calls that the client has no method for, such as those about API keys and rates."""
        return self.client.queue

    @property
    def keys(self) -> Keys:
        return self.queue.keys


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves an HTTP request."""
    return cast(Gateway, request.app.state.gateway)


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
"""A route's parameter of this type is its gateway."""
