"""A limit far beyond where texts really end costs no place in the batch.

Each request may take most of the KV cache, and ends with a stop token long before. Reserved by
`max_tokens`, one would run at a time; by what is held now, the whole batch does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import redis.asyncio

from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue.request_queue import AsyncRequestQueue, new_request_id
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.sequence import Batch
from tests.support.model_free import (
    ModelFreeRunner,
    finished,
    running_worker,
    served_model_free,
    text_of,
)

MAX_NUM_SEQS = 16
MAX_TOKENS = 1000
STOP = "q"
PROMPT = "Once upon a time"
SHORTEST, LONGEST = 20, 60  # tokens that are really generated
BLOCK_SIZE = 16
BLOCKS_EACH = (len(PROMPT) + LONGEST) // BLOCK_SIZE + 1
NUM_BLOCKS = MAX_NUM_SEQS * BLOCKS_EACH + 2  # a full batch, and what admissions leave free


class CountingRunner(ModelFreeRunner):
    """Notes how many sequences each step has."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, step_seconds=0.004)
        self.batch_sizes: list[int] = []

    def launch(self, batch: Batch) -> Batch:
        self.batch_sizes.append(len(batch.scheduled))
        return super().launch(batch)


def seeds() -> Iterator[int]:
    """Returns seeds whose text comes to the stop token in time."""
    return (seed for seed in count() if SHORTEST <= text_of(seed, 100).find(STOP) < LONGEST)


async def test_requests_that_end_long_before_their_limit_fill_the_batch(redis_url: str) -> None:
    assert NUM_BLOCKS * BLOCK_SIZE < 2 * MAX_TOKENS, "at their limits no two would fit"
    runner = CountingRunner()
    engine = LLMEngine(runner, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512)
    fresh = seeds()

    async with (
        redis.asyncio.Redis.from_url(redis_url) as client,
        running_worker(redis_url, replace(served_model_free(), engine=engine)) as worker,
    ):
        queue = AsyncRequestQueue(client)

        async def run(num: int) -> list[int]:
            """Batch sizes of the steps that so many requests took, all enqueued at once."""
            chosen = list(islice(fresh, num))
            requests = [
                Request(prompt=PROMPT, seed=seed, max_tokens=MAX_TOKENS, stop_token_ids=[ord(STOP)])
                for seed in chosen
            ]
            new = [NewRequest(new_request_id(), request) for request in requests]
            runner.batch_sizes.clear()
            ids = await queue.enqueue(new)
            for seed, request_id in zip(chosen, ids, strict=True):
                result = await finished(queue, request_id)
                assert result["finish_reason"] == "stop"
                assert result["text"] == text_of(seed, 100).partition(STOP)[0]
            return runner.batch_sizes.copy()

        await run(MAX_NUM_SEQS)  # from these the queue knows how long answers are
        batch_sizes = await run(5 * MAX_NUM_SEQS)
        assert max(batch_sizes) == MAX_NUM_SEQS
        # A step without a model is over so soon that those who fill a slot may come a step late.
        kept = statistics.median(batch_sizes)
        assert kept > MAX_NUM_SEQS / 2, "it is kept full, not only begun so"
        assert worker.engine.stats.num_preemptions == 0
