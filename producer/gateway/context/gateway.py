"""What all routes of one gateway share, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from promptq.producer.batch_store.file_quotas import FileQuotas
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.gateway.context.background_cancels import BackgroundCancels
from promptq.producer.gateway.context.key_uses import KeyUses
from promptq.producer.gateway.context.refusals import Refusals
from promptq.producer.gateway.context.served_queues import ServedQueues
from promptq.producer.gateway.http.body_budget import BodyBudget
from promptq.producer.settings import GatewaySettings
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.request_queue import AsyncRequestQueue


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process: its settings, the queues that it serves, and what it keeps in memory."""

    settings: GatewaySettings
    queues: ServedQueues
    redis_user: str
    """The user that the Redis server knows it as."""
    cancels: BackgroundCancels
    bodies: BodyBudget
    """The budget for bodies in memory."""
    uploads: BodyBudget
    """The budget for uploads on their way to the disk."""
    file_quotas: FileQuotas
    key_uses: KeyUses
    refusals: Refusals

    @property
    def client(self) -> AsyncClient:
        """Of the gateway's own queue."""
        return self.queues.own.client

    @property
    def queue(self) -> AsyncRequestQueue:
        """The gateway's own queue, which holds API keys, files and batches."""
        return self.queues.own.queue

    @property
    def keys(self) -> Keys:
        return self.queue.keys


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves an HTTP request."""
    return cast(Gateway, request.app.state.gateway)


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
"""A route's parameter of this type is its gateway."""
