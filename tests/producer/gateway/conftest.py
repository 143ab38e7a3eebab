"""A gateway on a real socket, OpenAI's clients in front of it and workers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import openai
import pytest

from shared.settings import Settings
from tests.producer.gateway.living import LiveGateway, live_gateway, live_worker
from worker.building import Served, build
from worker.service import Worker
from worker.start_up import StartUp


@pytest.fixture
def start_gateway(redis_url: str) -> Iterator[Callable[..., LiveGateway]]:
    """Starts gateways on the empty embedded server, with these settings."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            live_gateway(**{"redis_url": redis_url, **settings})
        )


@pytest.fixture
def gateway(start_gateway: Callable[..., LiveGateway]) -> LiveGateway:
    return start_gateway()


@pytest.fixture
def http(gateway: LiveGateway) -> Iterator[httpx2.Client]:
    """A plain HTTP client of the gateway."""
    with httpx2.Client(base_url=gateway.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(gateway: LiveGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which asks once, so that a test sees each answer."""
    with openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def letters(redis_url: str) -> Iterator[Worker]:
    """A worker on the model-free engine."""
    with live_worker(redis_url) as worker:
        yield worker


@pytest.fixture(scope="session")
def shipped() -> Served:
    return build(Settings(max_num_seqs=8, native=True), StartUp())


@pytest.fixture
def stories(redis_url: str, shipped: Served) -> Iterator[Any]:
    """A worker with the shipped model."""
    with live_worker(redis_url, shipped) as worker:
        yield worker
