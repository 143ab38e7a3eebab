"""Is this process alive, and would a request be served?"""

from __future__ import annotations

from fastapi import APIRouter

from producer.gateway.context import ThisGateway
from producer.gateway.errors import ApiError

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """This process answers; says nothing of the queue."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(gateway: ThisGateway) -> dict[str, str]:
    """The queue can be reached and some worker is alive; 503 otherwise."""
    stats = await gateway.client.stats()
    if not stats.workers:
        raise ApiError(503, "no worker is alive", code="no_worker")
    return {"status": "ready"}
