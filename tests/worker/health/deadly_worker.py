"""A worker that dies of the token `!`: python -m tests.worker.health.deadly_worker URL."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import redis.asyncio

from promptq.shared.settings.common import Settings
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch
from promptq.worker.serve.worker import Worker
from tests.model_free import ModelFreeRunner, ModelFreeStep
from tests.model_free_worker import served_model_free

EXIT_CODE = 66


class DeadlyRunner(ModelFreeRunner):
    """Ends the process in the step that meets `!`, as a fault of a driver does."""

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        if any(ord("!") in share.sequence.token_ids for share in batch.scheduled):
            os._exit(EXIT_CODE)
        return super().launch(batch, after)


async def serve(url: str) -> None:
    engine = LLMEngine(
        DeadlyRunner(num_blocks=1024, step_seconds=0.002),
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )
    async with redis.asyncio.Redis.from_url(url) as client:
        served = replace(served_model_free(), engine=engine)
        worker = Worker(Settings(lease_ms=2000), served, client)
        await worker.start()
        await worker.serve(asyncio.Event())
        await worker.drain(asyncio.Event())
        await worker.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
