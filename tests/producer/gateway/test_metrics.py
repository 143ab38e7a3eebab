"""The gateway's /metrics, scraped as Prometheus would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from promptq import AsyncClient
from promptq.producer.gateway.app import create_app
from promptq.producer.gateway.monitoring import metrics as metrics_route
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.runtime import metrics
from tests.producer.playing import bury
from tests.support.model_free import running_worker, served_model_free
from tests.support.waiting import async_until


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://gateway", timeout=None
        ) as client:
            yield client


async def scrape(client: httpx2.AsyncClient) -> dict[str, Metric]:
    reply = await client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def values(families: dict[str, Metric], spec: metrics.Spec) -> dict[tuple[str, ...], float]:
    suffix = {"counter": "_total", "histogram": "_count"}.get(spec.kind, "")
    return {
        tuple(it.labels[name] for name in spec.labels): it.value
        for it in families[spec.full_name].samples
        if it.name == spec.full_name + suffix
    }


async def test_reports_the_queue_and_http_answers(redis_url: str) -> None:
    app = create_app(GatewaySettings(redis_url=redis_url))
    async with client_of(app) as client, AsyncClient(redis_url) as queue:
        async with running_worker(redis_url):
            told = await scrape(client)
        assert values(told, metrics.WORKERS) == {("default",): 1}
        for priority in (0, 0, -3):
            await queue.enqueue("x", priority=priority)
        await queue.enqueue("x", delay_ms=60_000)
        for path in ("/healthz", "/healthz", "/readyz", "/not/a/path", "/nor/this"):
            await client.get(path)
        told = await scrape(client)
    assert values(told, metrics.QUEUE_UP) == {("default",): 1}
    assert values(told, metrics.WAITING) == {("model-free", "0"): 3}
    assert values(told, metrics.QUEUE_WAITING) == {("default", "-3"): 1, ("default", "0"): 2}
    assert values(told, metrics.QUEUE_DELAYED) == {("default",): 1}
    assert values(told, metrics.WORKERS) == {("default",): 0}
    answered = values(told, metrics.HTTP_REQUESTS)
    assert answered["/healthz", "GET", "200"] == 2
    assert answered["/readyz", "GET", "503"] == 1
    assert answered["unknown", "GET", "404"] == 2
    assert values(told, metrics.HTTP_SECONDS)["/healthz", "GET"] == 2
    assert values(told, metrics.HTTP_OPEN) == {(): 1}  # this scrape


async def test_shows_running_requests_dead_letters_and_a_pause(redis_url: str) -> None:
    bury(redis_url, "one", "two")
    app = create_app(GatewaySettings(redis_url=redis_url))
    async with client_of(app) as client, AsyncClient(redis_url) as queue:
        served = served_model_free(step_seconds=0.01)
        async with running_worker(redis_url, served):
            running = await queue.enqueue("x", max_tokens=3000)
            await anext(queue.stream(running))
            busy = await scrape(client)
            await queue.cancel(running)
            await queue.result(running, check=False)
        await queue.pause()
        paused = await scrape(client)
    told = [(metrics.QUEUE_ACTIVE, 1, 0), (metrics.QUEUE_PAUSED, 0, 1), (metrics.QUEUE_DEAD, 2, 2)]
    for spec, while_busy, while_paused in told:
        assert values(busy, spec) == {("default",): while_busy}
        assert values(paused, spec) == {("default",): while_paused}


async def test_calls_at_once_share_what_is_read(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call gets metrics that were read after it."""
    app = create_app(GatewaySettings(redis_url=redis_url))
    async with client_of(app) as client, AsyncClient(redis_url) as queue:
        own: AsyncClient = app.state.gateway.client
        reads: list[None] = []
        arrived: list[str] = []
        read = own.overview

        def arriving(accept: str) -> Any:
            arrived.append(accept)
            return choose_encoder(accept)

        async def noting() -> Any:
            reads.append(None)
            overview = await read()
            if len(reads) == 1:  # the others call meanwhile
                calls.extend(asyncio.create_task(scrape(client)) for _ in range(5))
                await async_until(lambda: len(arrived) == 6)
                await queue.enqueue("x")
            return overview

        calls: list[asyncio.Task[dict[str, Metric]]] = []
        monkeypatch.setattr(own, "overview", noting)
        monkeypatch.setattr(metrics_route, "choose_encoder", arriving)
        first = await scrape(client)
        others = [await call for call in calls]
    assert len(reads) == 2
    told = [values(families, metrics.QUEUE_WAITING) for families in (first, *others)]
    assert told == [{("default", "0"): 0}, *[{("default", "0"): 1}] * 5]


async def test_answers_while_redis_is_away() -> None:
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1/0"))
    async with client_of(app) as client:
        told = await scrape(client)
    assert values(told, metrics.QUEUE_UP) == {("default",): 0}
    assert metrics.WAITING.full_name not in told
