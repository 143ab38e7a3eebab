"""docs/queue.md names what the queue has; tests/docs runs its examples."""

from __future__ import annotations

import re

import redis.asyncio

from promptq import AsyncRequestQueue, RequestQueue
from promptq.shared.protocol.request import NewRequest, Request
from tests.support.paths import ROOT
from tests.support.roles import as_role

PAGE = ROOT / "docs" / "queue.md"


def test_the_page_names_each_method() -> None:
    """Of those for producers and consumers; `sweep`, `requeue` and `purge` are for upkeep."""
    methods = {name for name in vars(RequestQueue) if not name.startswith("_")}
    named = {name for name in methods if re.search(rf"queue\.{name}\(|`{name}`", PAGE.read_text())}
    assert methods - named == {"sweep", "requeue", "purge"}
    assert methods == {name for name in vars(AsyncRequestQueue) if not name.startswith("_")}


async def test_the_asynchronous_queue_is_exported_too(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as server:
        queue = AsyncRequestQueue(server)
        await queue.enqueue([NewRequest("a", Request.build({"prompt": "Hi"}))])
        claim = await queue.take(timeout=5)
    assert claim is not None
    assert claim.request_id == "a"
