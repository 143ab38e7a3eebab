"""A queue on the embedded server, for tests with a worker in their event loop."""

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
