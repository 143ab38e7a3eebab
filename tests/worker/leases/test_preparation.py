"""A worker holds a claimed request while it prepares it, however long that takes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.protocol.request import MAX_PROMPT_LOGPROBS, NewRequest, Request
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.worker.engine.api.messages import EngineAbilities
from promptq.worker.leases.prepare_or_resume import Preparation
from promptq.worker.text.tokenizer import ByteTokenizer
from tests.support.model_free import finished, running_worker, served_model_free, text_of
from tests.support.requests import async_put, until_active
from tests.worker.leases.world import Bounds


class WaitingTokenizer(ByteTokenizer):
    """Stands at the prompt `wait` until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode_prompt(self, request: Request) -> list[int]:
        if request.prompt == "wait":
            self.go_on.wait()
        return super().encode_prompt(request)


async def test_a_preparation_that_takes_longer_than_a_lease_loses_nothing(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    """Neither the one that takes so long nor those that were claimed with it."""
    tokenizer = WaitingTokenizer()
    served = replace(served_model_free(), tokenizer=tokenizer)
    async with running_worker(redis_url, served, lease_ms=400):
        prompts = ["a", "wait", "b"]
        requests = [
            NewRequest(new_request_id(), Request.build({"prompt": it, "seed": n, "max_tokens": 5}))
            for n, it in enumerate(prompts)
        ]
        ids = await queue.enqueue(requests)
        await until_active(queue, ids[1])
        await asyncio.sleep(1.5)
        tokenizer.go_on.set()
        for n, request_id in enumerate(ids):
            result = await finished(queue, request_id)
            assert (result["text"], result["stats"]["attempts"]) == (text_of(n, 5), 1)
            record = await queue.run(lookups.record(queue.keys, request_id))
            assert "crashes" not in record


async def test_a_cancel_does_not_wait_for_the_end_of_a_preparation(
    redis_url: str, queue: AsyncRequestQueue
) -> None:
    tokenizer = WaitingTokenizer()
    served = replace(served_model_free(), tokenizer=tokenizer)
    async with running_worker(redis_url, served, lease_ms=400) as worker:
        request_id = await async_put(queue, prompt="wait")
        await until_active(queue, request_id)
        await queue.cancel(request_id)
        assert (await finished(queue, request_id))["finish_reason"] == "cancelled"
        other = await async_put(queue, prompt="a", seed=1, max_tokens=5)
        tokenizer.go_on.set()
        assert (await finished(queue, other))["text"] == text_of(1, 5)
        assert worker.leases.ready.num_handed_out == 1, "what was cancelled is not run"


async def test_log_probabilities_of_too_long_a_prompt_are_refused(queue: AsyncRequestQueue) -> None:
    """Before they are computed: they would all be in one message."""
    served = served_model_free()
    limits = replace(served.engine.limits, max_model_len=70_000)
    preparation = Preparation(
        ByteTokenizer(), Bounds(limits, EngineAbilities()), ModelIdentity(), frozenset()
    )
    claims = []
    for length in (MAX_PROMPT_LOGPROBS // 4, MAX_PROMPT_LOGPROBS // 4 + 1):
        await async_put(queue, prompt="x" * length, prompt_logprobs=3)
        claims.append(await queue.take())
    allowed, refused = claims
    assert allowed is not None
    assert refused is not None
    preparation.prepare(allowed)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: 3 likeliest") as raised:
        preparation.prepare(refused)
    assert raised.value.field == "prompt_logprobs"
