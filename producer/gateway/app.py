"""Puts a gateway together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from producer.async_client import AsyncClient
from producer.connecting import server_url
from producer.gateway import errors
from producer.gateway.context import Gateway
from producer.gateway.routes import batches, files, health
from shared.connection import make_async_redis
from shared.keys import Keys
from shared.settings import Settings

_ROUTERS = (
    health.router,
    files.router,
    batches.router,
)


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application of one gateway. Raises RedisUnavailableError if no server is named."""
    url = server_url(settings.redis_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connection = make_async_redis(url)
        client = AsyncClient(connection, settings.queue)
        app.state.gateway = Gateway(settings, client, connection, Keys(settings.queue))
        try:
            yield
        finally:
            await client.close()
            await connection.aclose()

    app = FastAPI(title="promptq", lifespan=lifespan)
    errors.add_handlers(app)
    for router in _ROUTERS:
        app.include_router(router)
    return app
