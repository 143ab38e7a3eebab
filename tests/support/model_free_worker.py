"""Workers on the model-free engine, and what they answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio

from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.runtime.tracing import Tracing
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.serve.build import Served
from promptq.worker.serve.worker import Worker
from promptq.worker.text.tokenizer import ByteTokenizer
from tests.support.model_free import END_TOKEN_ID, build_model_free_engine, tokens_of
from tests.support.roles import as_role

BY_ITSELF = {"max_events_per_second": math.inf}
"""Settings of a worker that sends each token by itself."""


def served_model_free(*, name: str = "model-free", **options: Any) -> Served:
    """The model-free engine with its cache checks on, as a worker serves it under that name."""
    return Served(
        engine=build_model_free_engine(**options),
        tokenizer=ByteTokenizer(),
        identity=ModelIdentity(name, name),
        end_token_ids=frozenset({END_TOKEN_ID}),
        device="none",
        dtype="none",
    )


def text_of(seed: int, num_tokens: int) -> str:
    """What the model-free engine answers to any prompt with this seed."""
    return bytes(tokens_of(seed, num_tokens)).decode()


@asynccontextmanager
async def running_worker(
    url: str, served: Served | None = None, *, tracing: Tracing | None = None, **settings: Any
) -> AsyncIterator[Worker]:
    """A worker in this event loop and its role, on the model-free engine unless told otherwise.

    It is drained at the end, and must then hold nothing.
    """
    async with redis.asyncio.Redis.from_url(as_role("worker", url)) as client:
        engine = served or served_model_free()
        worker = Worker(WorkerSettings(**settings), engine, client, tracing=tracing)
        await worker.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(worker.serve(stop))
        try:
            yield worker
            stop.set()
            await serving
            await worker.drain(asyncio.Event())
        finally:
            serving.cancel()
            await worker.stop()
    assert len(worker.leases) == 0
    assert worker.leases.num_running == 0
    if hasattr(worker.served.engine, "check_integrity"):  # an engine that is not elsewhere
        worker.served.engine.check_integrity()
    assert worker.served.engine.stats.num_used_blocks == 0


async def finished(queue: AsyncRequestQueue, request_id: str) -> dict[str, Any]:
    """The result of a request, once it has one."""
    while True:
        state = await queue.state(request_id)
        if state is not None and state.is_final:
            break
        await asyncio.sleep(0.005)
    record = await queue.run(lookups.record(queue.keys, request_id))
    result: dict[str, Any] = json.loads(record["result"])
    return result
