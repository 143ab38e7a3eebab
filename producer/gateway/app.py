"""Creates the web application of a gateway: its routes and its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import redis.asyncio
from fastapi import FastAPI
from redis.exceptions import RedisError
from starlette.middleware.cors import CORSMiddleware

from promptq.producer.admin import api_keys
from promptq.producer.apis import batches, files, models, quotes, streams, tokens
from promptq.producer.apis.completions import route as completions
from promptq.producer.apis.embeddings import route as embeddings
from promptq.producer.apis.messages import route as messages
from promptq.producer.apis.readers import READERS
from promptq.producer.apis.responses import route as responses
from promptq.producer.apis.responses.response_records import ResponseRecords
from promptq.producer.batch_store.file_quotas import FileQuotas
from promptq.producer.batch_store.files import FileStore
from promptq.producer.batch_store.input_file import MAX_FILE_BYTES
from promptq.producer.calls.call_reader import CallReader
from promptq.producer.calls.errors import log_why_unavailable, redis_side_error
from promptq.producer.calls.picture_urls import PictureFetcher
from promptq.producer.calls.queues import ServedQueues, log_unreadable
from promptq.producer.clients.async_client import AsyncClient
from promptq.producer.clients.connecting import server_url
from promptq.producer.gateway.dashboard import actions, page_files, pages
from promptq.producer.gateway.monitoring import autoscaling_endpoint, docs, health, metrics
from promptq.producer.http import errors
from promptq.producer.http.bodies import BodyBudget
from promptq.producer.http.meter import HttpMeter, Measured, Traced
from promptq.producer.http.state import BackgroundCancels, Gateway, KeyUses, Refusals
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.protocol.keys import ALL_QUEUES, Keys
from promptq.shared.queue import scripts
from promptq.shared.queue.maxmemory_policy import LOOK_SECONDS, MaxmemoryLog, maxmemory_warning
from promptq.shared.runtime.tasks import end, kept_up
from promptq.shared.runtime.tracing import start_tracing
from promptq.shared.server.connection import make_async_redis

_ROUTERS = (
    health.router,
    metrics.router,
    autoscaling_endpoint.router,
    completions.router,
    quotes.router,
    embeddings.router,
    streams.router,
    responses.router,
    messages.router,
    models.router,
    tokens.router,
    files.router,
    batches.router,
    docs.router,
    page_files.router,
    pages.router,
    actions.router,
)
_ANSWER_SECONDS = 5.0  # for the server to accept or refuse a subscription
_UPLOADS_OF_TENANT = 4
_UPLOADS = 16
"""The most uploads of the largest size that run at the same time. An upload uses twice its size on
the disk until it is complete."""


def create_app(settings: GatewaySettings) -> FastAPI:
    """Returns the ASGI application of one gateway. Raises RedisUnavailableError without a server's
    URL, ConfigurationError for a wrong setting."""
    url = server_url(settings.redis_url)
    # Raises for a wrong URL or name before any process starts.
    make_async_redis(url)
    for name in settings.served_queues:
        if name != ALL_QUEUES:
            Keys(name)
    tracing = start_tracing("promptq-gateway", settings.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connections: list[redis.asyncio.Redis] = []

        def open_client(queue: str) -> AsyncClient:
            # A client may use half of a pool's connections, so each has a separate pool.
            connections.append(make_async_redis(url))
            return AsyncClient(connections[-1], queue, tracing=tracing)

        queues = ServedQueues(open_client, settings.served_queues, on_unreadable=log_unreadable)
        cancels, files = BackgroundCancels(), FileStore(settings.files_dir)
        app.state.gateway = Gateway(
            settings,
            queues,
            connections[0].connection_pool.connection_kwargs.get("username") or "default",
            CallReader(READERS, settings.log_level, settings.log_format, queues.guess_outputs),
            cancels,
            BodyBudget(
                max(settings.http_body_bytes_per_tenant, settings.http_max_body_bytes),
                max(settings.http_body_bytes, 2 * settings.http_max_body_bytes),
            ),
            BodyBudget(_UPLOADS_OF_TENANT * MAX_FILE_BYTES, _UPLOADS * MAX_FILE_BYTES),
            FileQuotas(
                files,
                settings.files_bytes_per_tenant,
                settings.files_per_tenant,
            ),
            KeyUses(queues.own.queue),
            Refusals(),
            PictureFetcher(files),
        )
        tasks = [
            asyncio.create_task(_look_at_server(app.state.gateway)),
            asyncio.create_task(kept_up("responses", ResponseRecords(app.state.gateway).keep_all)),
        ]
        try:
            yield
        finally:
            await end(tasks)
            await app.state.gateway.call_reader.aclose()
            app.state.gateway.pictures.close()
            await cancels.aclose()
            await queues.aclose()
            for connection in connections:
                await connection.aclose()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="promptq",
        description="A queue for language models, with the API of OpenAI.",
        lifespan=lifespan,
        openapi_url=None,  # docs.router serves the document, and a page built from it
    )
    app.state.stopping = asyncio.Event()
    app.state.descriptions, app.state.scrapes = {}, metrics.Scrapes()
    errors.add_handlers(app)
    if settings.http_cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.http_cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    # include_router would build all routes again, which takes 0.1 s of CPU time.
    app.router.routes += [route for router in _ROUTERS for route in router.routes]
    if tracing is not None:
        app.add_middleware(Traced, tracing=tracing)
    app.state.http_meter = HttpMeter()
    app.add_middleware(Measured, meter=app.state.http_meter, logs=settings.http_log_requests)
    return app


async def _look_at_server(gateway: Gateway) -> None:
    # Logs why calls would get status 503, before the first call.
    try:
        await gateway.queue.run([api_keys.count(gateway.keys), scripts.try_channels()])
        async with gateway.queue.redis.pubsub() as channel:
            await channel.subscribe(gateway.keys.events("any"))
            # Raises an error if the server has refused the subscription.
            await channel.get_message(timeout=_ANSWER_SECONDS)
    except RedisError as error:
        explained = redis_side_error(error, gateway.client.url, gateway.redis_user)
        log_why_unavailable(explained)
    log = MaxmemoryLog()
    while True:
        with suppress(RedisError):  # calls log why the server is away
            log.note(await gateway.queue.run(maxmemory_warning()))
        await asyncio.sleep(LOOK_SECONDS)
