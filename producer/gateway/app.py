"""Puts a gateway together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from producer.async_client import AsyncClient
from producer.connecting import server_url
from producer.gateway import errors
from producer.gateway.cancels import Cancels
from producer.gateway.context import Gateway
from producer.gateway.http_meter import measure_http
from producer.gateway.http_tracing import trace_http
from producer.gateway.queue_view import QueueWatch
from producer.gateway.routes import (
    batches,
    chat,
    completions,
    dashboard,
    dashboard_actions,
    docs,
    files,
    health,
    metrics,
    models,
    streams,
)
from producer.gateway.settings import GatewaySettings
from shared.connection import make_async_redis
from shared.request_queue import AsyncRequestQueue
from shared.tracing import start_tracing

_ROUTERS = (
    health.router,
    metrics.router,
    chat.router,
    completions.router,
    streams.router,
    models.router,
    files.router,
    batches.router,
    docs.router,
    dashboard.router,
    dashboard_actions.router,
)
_MAX_CALLING = 32


def create_app(settings: GatewaySettings) -> FastAPI:
    """The ASGI application of one gateway. Raises RedisUnavailableError if no server is named."""
    url = server_url(settings.redis_url)
    tracing = start_tracing("promptq-gateway", settings.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connection = make_async_redis(url)
        client = AsyncClient(connection, settings.queue, tracing=tracing)
        calling = asyncio.Semaphore(_MAX_CALLING)
        cancels = Cancels(client, calling)
        queue = AsyncRequestQueue(connection, settings.queue)
        watch = QueueWatch(connection, queue.keys, url)
        app.state.gateway = Gateway(settings, client, connection, queue, watch, cancels, calling)
        try:
            yield
        finally:
            await cancels.aclose()
            await client.close()
            await connection.aclose()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="promptq",
        description="A queue for language models, with the API of OpenAI.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.stopping = asyncio.Event()
    errors.add_handlers(app)
    for router in _ROUTERS:
        app.include_router(router)
    return measure_http(trace_http(app, tracing))
