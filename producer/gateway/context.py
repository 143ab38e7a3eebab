"""What all routes of one gateway share, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from producer.async_client import AsyncClient
from shared.keys import Keys
from shared.request_queue import AsyncRequestQueue
from shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process: its settings, and its client of the queue."""

    settings: Settings
    client: AsyncClient
    queue: AsyncRequestQueue
    """For calls that the client has no method for."""

    @property
    def keys(self) -> Keys:
        return self.queue.keys


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves an HTTP request."""
    return cast(Gateway, request.app.state.gateway)


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
"""A route's parameter of this type is its gateway."""
