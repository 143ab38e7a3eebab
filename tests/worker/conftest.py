"""A queue on the embedded server, and its address for workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.roles import AsyncQueueClient, as_role


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[AsyncRequestQueue]:
    client = AsyncQueueClient.from_url(as_role("", redis_url))
    yield AsyncRequestQueue(client)
    await client.aclose()


@pytest.fixture
def worker_url(redis_url: str) -> str:
    return as_role("worker", redis_url)
