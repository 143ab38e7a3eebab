"""Health probes: whether the gateway is alive, and whether requests would be served."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from promptq.producer.admin import api_keys
from promptq.producer.admin.queue_stats import QueueStats
from promptq.producer.calls.errors import ApiError
from promptq.producer.http.errors import described
from promptq.producer.http.state import ThisGateway
from promptq.shared.queue import scripts

router = APIRouter(tags=["health"])


@router.get("/healthz")
@router.head("/healthz", include_in_schema=False)
@router.get("/health", include_in_schema=False)  # vLLM's name
async def healthz() -> dict[str, str]:
    """Answers 200 while the gateway is alive. Does not check the queue."""
    return {"status": "ok"}


@router.get("/readyz", responses=described(503))
@router.head("/readyz", include_in_schema=False)
async def readyz(gateway: ThisGateway) -> dict[str, str]:
    """Answers 200 if the queues can be read and requests would be served: a worker claims requests
    and makes progress, or a worker will load a model when requests come. Otherwise answers 503.

    `warning` describes a danger in the Redis server's settings.
    """
    # Most calls read API keys and publish messages, so the server must allow both.
    await gateway.queue.run([api_keys.count(gateway.keys), scripts.try_channels()])
    stats = [await served.client.stats() for served, _ in await gateway.queues.views()]
    await gateway.queues.views(now=True)  # so that the next call knows of these workers
    workers = [worker for each in stats for worker in each.workers]
    is_loaded = any(worker.state != "draining" for worker in workers)
    if not is_loaded and any(each.has_standby for each in stats):
        return _ready(stats)
    if not workers:
        raise ApiError(503, "no worker is alive", code="no_worker")
    patience_ms = gateway.settings.http_ready_seconds * 1000
    taking = [worker for worker in workers if worker.state == "running"]
    if not any(worker.current_step_ms <= patience_ms for worker in taking):
        what = "makes progress" if taking else "takes further requests"
        raise ApiError(503, f"none of the {len(workers)} workers {what}", code="no_progress")
    return _ready(stats)


def _ready(stats: Sequence[QueueStats]) -> dict[str, str]:
    warning = next(filter(None, (each.server_warning for each in stats)), "")
    return {"status": "ready", **({"warning": warning} if warning else {})}
