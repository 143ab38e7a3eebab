"""Nobody learns from the cache of prefixes what another tenant sent."""

from __future__ import annotations

import json
from typing import Any

from promptq.shared.protocol.claims import ClaimContext, ModelIdentity, Room
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.sequence import Sequence
from tests.support.model_free import finished, running_worker, served_model_free
from tests.support.roles import AsyncQueueClient, as_role

PROMPT = "x" * 64
"""Three blocks of 16 tokens can be found, as one token at least is computed."""
FOUND = 48


async def cached(queue: AsyncRequestQueue, tenant: str | None = None, **fields: Any) -> int:
    """Returns how many cached tokens the usage of the tenant's request reports."""
    given = {"prompt": PROMPT, "max_tokens": 2, "tenant": tenant, **fields}
    (request_id,) = await queue.enqueue([NewRequest(new_request_id(), Request.build(given))])
    told: int = (await finished(queue, request_id))["usage"]["cached_tokens"]
    return told


async def test_a_tenant_finds_only_its_own_prefixes(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with running_worker(redis_url) as worker:
        assert await cached(queue, "a") == 0
        assert await cached(queue, "b") == 0, "which would tell what `a` sent"
        assert await cached(queue) == 0
        assert worker.engine.stats.cached_tokens == 0
        assert [await cached(queue, it) for it in ("a", "b", None, None)] == [FOUND] * 4
        assert await cached(queue, "a", cache_salt="s") == 0
        assert await cached(queue, "a", cache_salt="s") == FOUND


async def test_the_queue_says_whose_a_request_is_and_not_its_payload(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    async with (
        running_worker(redis_url),
        AsyncQueueClient.from_url(as_role("", redis_url)) as client,
    ):
        assert await cached(queue, "a") == 0
        request_id, keys = new_request_id(), queue.keys
        payload = {"prompt": PROMPT, "max_tokens": 2, "tenant": "a"}
        await client.hset(keys.request(request_id), "payload", json.dumps(payload))
        await client.sadd(f"{keys.pending.removesuffix('pending')}tenants:waiting", "b")
        await client.zadd(f"{keys.pending}:b", {request_id: 0})
        assert (await finished(queue, request_id))["usage"]["cached_tokens"] == 0


async def test_a_claim_that_is_given_once_more_names_the_tenant_again(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    request = Request.build({"prompt": PROMPT, "tenant": "a"})
    await queue.enqueue([NewRequest("one", request)])
    room, context = Room(max_count=1, token_budget=1000), ClaimContext(session="s", number=1)
    async with AsyncQueueClient.from_url(as_role("worker", redis_url)) as client:
        worker = AsyncRequestQueue(client)
        call = scripts.claim("w", 10_000, room, "nonce", "", ModelIdentity(), context)
        claims = [(await worker.run(call))[0] for _ in range(2)]
    assert [claim.tenant for claim in claims] == ["a", "a"]
    assert claims[0].fence == claims[1].fence


async def test_with_a_shared_cache_each_tenant_gets_the_counts_that_it_would_get_alone(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    served = served_model_free(share_prefix_cache=True)
    async with running_worker(redis_url, served, share_prefix_cache=True) as worker:
        assert await cached(queue, "a") == 0
        assert await cached(queue, "b") == 0, "which would tell what `a` sent"
        assert worker.engine.stats.cached_tokens == FOUND, "and yet it was not computed again"
        assert await cached(queue, "b") == FOUND, "0 would tell that somebody else sent it first"
        assert await cached(queue, "a") == FOUND
        assert await cached(queue, "b", prompt="x" * 32 + "y" * 32) == 32


def test_no_salt_of_one_spells_tenant_and_salt_of_another() -> None:
    pairs = [("", "ab"), ("a", "b"), ("ab", ""), ("", "a\0b"), ("a", "\0b"), ("", '["a","b"]')]
    found = set()
    for number, (tenant, salt) in enumerate(pairs):
        request = EngineRequest(
            number, [1] * 17, Request.build({"prompt": [1]}), 0, 4, cache_salt=salt, tenant=tenant
        )
        sequence = Sequence.of(request)
        BlockManager(4, 16).find_prefix(sequence)
        found.add(sequence.block_hashes[0])
    assert len(found) == len(pairs)
