"""The examples of docs/queue.md, run from top to bottom on a real server."""

from __future__ import annotations

import re
from typing import Any

import redis.asyncio

from promptq import AsyncRequestQueue, RequestQueue
from promptq.shared.protocol.request import NewRequest, Request
from tests.paths import ROOT
from tests.roles import as_role

PAGE = ROOT / "docs" / "queue.md"
ADDRESS = "redis://localhost:6379/0"


def test_the_examples_of_the_page_do_what_they_say(redis_url: str) -> None:
    text = PAGE.read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert ADDRESS in examples[0]
    names: dict[str, Any] = {}
    for example in examples:
        line = text[: text.index(example)].count("\n")
        code = "\n" * line + example.replace(ADDRESS, as_role("", redis_url))
        exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102 # it is ours


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
