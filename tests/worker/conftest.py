"""A queue on the embedded server, and its address for workers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog

from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.logs import configure_logs
from tests.support.roles import AsyncQueueClient, as_role


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[AsyncRequestQueue]:
    client = AsyncQueueClient.from_url(as_role("", redis_url))
    yield AsyncRequestQueue(client)
    await client.aclose()


@pytest.fixture
def worker_url(redis_url: str) -> str:
    return as_role("worker", redis_url)


@pytest.fixture
def logs_in_json() -> Iterator[None]:
    """Log as a worker does, for one test: others in this process read logs of another form."""
    root = logging.getLogger()
    handlers, level, before = root.handlers[:], root.level, structlog.get_config()
    configure_logs("info", "json")
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)
