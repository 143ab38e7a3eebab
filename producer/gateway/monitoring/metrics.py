"""Serves metrics of the queues and of HTTP, for Prometheus. Each worker serves its own metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from promptq.producer.admin.overview import Overview
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.clients.connecting import explained
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.shared.errors import RedisSideError, SpoiltRecordError
from promptq.shared.runtime import metrics
from promptq.shared.runtime.metrics import Reading

router = APIRouter(tags=["metrics"])


class Scrapes:
    """Joins calls that wait at the same time: the metrics are read once for all of them. Callers
    need no key and have no rate limit, so this limits their cost."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._begun_at = float("-inf")
        self._found: list[Reading] = []
        self._pages: dict[str, bytes] = {}

    async def page(
        self,
        read: Callable[[], Awaitable[list[Reading]]],
        encode: Callable[[CollectorRegistry], bytes],
        content_type: str,
    ) -> bytes:
        """Returns the metrics, read after this call has begun, and encoded by `encode`."""
        called_at = time.monotonic()
        async with self._making:
            if self._begun_at < called_at:
                begun_at = time.monotonic()
                self._found, self._pages = await read(), {}
                self._begun_at = begun_at
            if content_type not in self._pages:
                self._pages[content_type] = encode(metrics.registry_of(lambda: self._found))
            return self._pages[content_type]


@router.get("/metrics", response_class=PlainTextResponse)
async def scrape(request: Request, gateway: ThisGateway) -> Response:
    """All metrics. A queue that cannot be read has only `queue_up`, which is 0."""
    try:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):  # an unknown version
        encode, content_type = choose_encoder("")
    scrapes: Scrapes = request.app.state.scrapes
    page = await scrapes.page(lambda: _read(request, gateway), encode, content_type)
    return Response(page, media_type=content_type)


async def _read(request: Request, gateway: Gateway) -> list[Reading]:
    readings: list[Reading] = []
    waiting: Counter[str] = Counter()  # by model, which several queues may serve
    for served in await _queues(gateway):
        try:
            overview = await served.client.overview()
        except (RedisSideError, SpoiltRecordError):
            overview = None
        readings += _of_queue(served.name, overview)
        if overview is not None:
            waiting[overview.model] += overview.waiting
    for model, n in waiting.items():
        readings.append((metrics.WAITING, (model, metrics.ENGINE), float(n)))
    readings += request.app.state.http_meter.readings()
    return readings


async def _queues(gateway: Gateway) -> list[ServedQueue]:
    try:
        with explained(gateway.client.url):
            return [served for served, _ in await gateway.queues.views()]
    except RedisSideError:
        return gateway.queues.opened


def _of_queue(queue: str, overview: Overview | None) -> Iterator[Reading]:
    yield metrics.QUEUE_UP, (queue,), float(overview is not None)
    if overview is None:
        return
    # The default priority always has a value, so that an empty queue leaves no gap in a graph.
    for priority, count in {0: 0, **overview.priorities}.items():
        yield metrics.QUEUE_WAITING, (queue, str(priority)), float(count)
    yield metrics.QUEUE_DELAYED, (queue,), float(overview.delayed)
    yield metrics.QUEUE_ACTIVE, (queue,), float(overview.active)
    yield metrics.QUEUE_DEAD, (queue,), float(overview.dead)
    yield metrics.QUEUE_PAUSED, (queue,), float(overview.paused)
    yield metrics.SERVER_EVICTS, (queue,), float(bool(overview.server_warning))
    yield metrics.WORKERS, (queue,), float(len(overview.workers))
    scaling = overview.scaling
    yield metrics.DESIRED_WORKERS, (queue,), float(scaling.desired)
    work = {"waiting": scaling.waiting_seconds, "running": scaling.running_seconds}
    for state, seconds in work.items():
        if seconds is not None:
            yield metrics.WORK, (queue, state), seconds
    yield metrics.OLDEST, (queue,), scaling.oldest_seconds
    yield metrics.AT_RISK, (queue,), float(scaling.deadlines_at_risk)
