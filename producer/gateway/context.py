"""What all routes of one gateway share, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

import redis.asyncio
from fastapi import Depends, Request

from producer.async_client import AsyncClient
from shared.keys import Keys
from shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process: its settings, its client of the queue, and a plain connection pool."""

    settings: Settings
    client: AsyncClient
    redis: redis.asyncio.Redis
    """For what no client method does: API keys, limits, files, statistics."""
    keys: Keys = field(default_factory=Keys)


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves an HTTP request."""
    return cast(Gateway, request.app.state.gateway)


ThisGateway = Annotated[Gateway, Depends(gateway_of)]
"""A route's parameter of this type is its gateway."""
