"""A request goes to a worker whose inference server can serve it, while one lives.

One of two stand-ins heeds no masks, so its worker serves no schemas.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from promptq.producer.admin.queue_views import queue_view
from promptq.shared.queue import lookups
from promptq.shared.queue.call import carry_out_async
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.leases.exchange import _MOST_ATTEMPTS
from promptq.worker.serve.worker import Worker
from tests.programs.stand_in_server.starting import StandIn, stand_in_server
from tests.support.model_free import finished, running_worker
from tests.support.requests import ROOM, async_put, held, row
from tests.support.waiting import async_until
from tests.worker.text.grammars.structured import closed, json_schema
from tests.worker.upstream.test_watched_streams import served

SCHEMA = closed(fox={"type": "string", "maxLength": 9})
FORM: dict[str, Any] = {"prompt": "a", "response_format": json_schema(SCHEMA), "max_tokens": 60}
PLAIN: dict[str, Any] = {"prompt": "a", "max_tokens": 5}
NAME = "vllm"


@pytest.fixture
def masking() -> Iterator[StandIn]:
    with stand_in_server(NAME, "--token-seconds", "0.001") as server:
        yield server


@pytest.fixture
def plain() -> Iterator[StandIn]:
    """Heeds no masks."""
    with stand_in_server(NAME, "--token-seconds", "0.001") as server:
        server.fail("unmask")
        yield server


@pytest.fixture
async def workers(
    redis_url: str, plain: StandIn, masking: StandIn, model: Path
) -> AsyncIterator[tuple[AsyncExitStack, list[Worker]]]:
    """The worker of the plain server, and that of the masking one, which the stack ends."""
    async with (
        AsyncExitStack() as stack,
        running_worker(redis_url, await served(NAME, plain.url, model)) as first,
    ):
        masks = running_worker(redis_url, await served(NAME, masking.url, model))
        yield stack, [first, await stack.enter_async_context(masks)]


async def needs_of(queue: AsyncRequestQueue, request_id: str) -> str:
    return (await queue.run(lookups.record(queue.keys, request_id))).get("needs", "")


async def refused_by_all(queue: AsyncRequestQueue) -> tuple[str, ...]:
    return (await carry_out_async(queue_view(queue.keys), queue.run)).refused


async def test_schemas_go_to_the_worker_that_serves_them_and_the_rest_to_both(
    queue: AsyncRequestQueue, workers: tuple[AsyncExitStack, list[Worker]], masking: StandIn
) -> None:
    _, (plain, masks) = workers
    masking.fail("overload")  # until the plain worker has served one, and handed one back
    await finished(queue, await async_put(queue, **PLAIN))
    ids, needs = list[str](), set[str]()
    while "response_format" not in needs:
        ids += [await async_put(queue, **fields) for fields in (FORM, PLAIN)]
        await finished(queue, ids[-1])
        needs = {await needs_of(queue, request_id) for request_id in ids[::2]}
    masking.fail("")
    ids += [await async_put(queue, **fields) for fields in [FORM, PLAIN] * 10]
    results = [await finished(queue, request_id) for request_id in ids]
    for result in results[::2]:
        assert result["finish_reason"] == "stop", result
        jsonschema.validate(json.loads(result["text"]), SCHEMA)
    assert all(result["finish_reason"] == "length" for result in results[1::2])
    assert {await needs_of(queue, request_id) for request_id in ids[1::2]} == {""}
    assert plain.engine.stats.num_processed > 0
    assert masks.engine.stats.num_processed >= len(ids) // 2


async def test_a_schema_is_refused_when_the_last_worker_that_serves_it_is_gone(
    queue: AsyncRequestQueue, workers: tuple[AsyncExitStack, list[Worker]]
) -> None:
    stack, (plain, masks) = workers
    assert "response_format" in plain.engine.abilities.refused
    assert "response_format" not in masks.engine.abilities.refused
    assert "response_format" not in await refused_by_all(queue)
    await stack.aclose()
    assert "response_format" in await refused_by_all(queue)
    result = await finished(queue, await async_put(queue, **FORM))
    assert result["error"] == {
        "type": "unsupported",
        "message": "response_format: no live worker's engine serves it",
    }


async def test_a_stream_that_no_worker_can_continue_ends_after_many_attempts(
    redis_url: str, queue: AsyncRequestQueue, plain: StandIn, model: Path
) -> None:
    """Until then, the server that began it may come back."""
    request_id = await async_put(queue, **FORM)
    (claim,) = await queue.take_batch(ROOM)
    await queue.publish([row(claim, 0)])
    await queue.release([held(claim)])
    key = queue.keys.request(request_id)
    await queue.redis.hset(key, "attempt", str(_MOST_ATTEMPTS - 4))
    async with running_worker(redis_url, await served(NAME, plain.url, model)):
        result = await finished(queue, request_id)
    assert result["error"]["type"] == "unsupported"
    assert result["token_ids"] == [7]
    assert int(await queue.redis.hget(key, "attempt") or 0) >= _MOST_ATTEMPTS


async def test_a_server_that_loses_an_ability_gets_no_such_request_until_it_has_it_again(
    queue: AsyncRequestQueue,
    workers: tuple[AsyncExitStack, list[Worker]],
    plain: StandIn,
    masking: StandIn,
) -> None:
    """No worker ends because of it, and what it held goes to the other one."""
    _, (first, second) = workers
    for server in (plain, masking):
        server.fail("overload")
    ids = [await async_put(queue, **fields) for fields in [FORM, PLAIN] * 8]
    await async_until(lambda: not first.engine.is_accepting and not second.engine.is_accepting)
    masking.fail("unmask")
    plain.fail("")
    results = [await finished(queue, request_id) for request_id in ids]
    assert {result["finish_reason"] for result in results[::2]} == {"stop"}
    assert {result["finish_reason"] for result in results[1::2]} == {"length"}
    await async_until(lambda: "response_format" in second.engine.abilities.refused)
    assert "response_format" not in first.engine.abilities.refused
