"""Gateways on real sockets, OpenAI's clients in front of them and workers behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import openai
import pytest

from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import Served, build
from tests.producer.gateway.living import LiveGateway, live_gateway, live_worker
from tests.support.roles import as_role
from tests.support.servers import embedded_server


@pytest.fixture
def start_gateway(redis_url: str) -> Iterator[Callable[..., LiveGateway]]:
    """Starts gateways with these settings, on the empty embedded server unless told otherwise."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            live_gateway(**{"redis_url": redis_url, **settings})
        )


@pytest.fixture(scope="session")
def lasting_gateway(embedded_url: str) -> Iterator[LiveGateway]:
    with live_gateway(as_role("gateway", embedded_url)) as gateway:
        yield gateway


@pytest.fixture
def gateway(lasting_gateway: LiveGateway, redis_url: str) -> LiveGateway:
    """A gateway of the embedded server, which is empty; it serves all tests, one by one."""
    return lasting_gateway


@pytest.fixture
def http(gateway: LiveGateway) -> Iterator[httpx2.Client]:
    """A plain HTTP client of the gateway."""
    with httpx2.Client(base_url=gateway.url, timeout=30) as client:
        yield client


@pytest.fixture
def openai_client(gateway: LiveGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which asks once, so that a test sees each answer."""
    with openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client:
        yield client


@contextmanager
def own_gateway(served: Served | None = None, **settings: Any) -> Iterator[LiveGateway]:
    """A gateway with a server and a worker of its own, each in its role; an event is a token."""
    with embedded_server() as default:
        url = as_role("producer", default)
        worker = live_worker(url, served, max_events_per_second=math.inf)
        with worker, live_gateway(url, **settings) as gateway:
            yield gateway


@pytest.fixture(scope="session")
def letters_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """On the model-free engine."""
    with own_gateway(files_dir=tmp_path_factory.mktemp("files")) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def letters(letters_gateway: LiveGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a gateway whose worker writes letters."""
    url = letters_gateway.base_url
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def stories_gateway() -> Iterator[LiveGateway]:
    """On the shipped model."""
    with own_gateway(build(WorkerSettings(max_num_seqs=8))) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def stories(stories_gateway: LiveGateway) -> Iterator[Any]:
    """OpenAI's client of a gateway whose worker has the shipped model."""
    url = stories_gateway.base_url
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
