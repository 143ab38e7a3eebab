"""Through Redis and back, greedy tokens are those of the library's `generate`.

Requests join and leave all the time; prefixes are shared, prompts are cut into chunks, and in one
setting the KV cache is so small that sequences are preempted.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from promptq.shared.protocol.claims import ModelIdentity
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.model.loading import LoadOptions
from promptq.worker.engine.runner.load_runner import load_runner
from promptq.worker.serve.build import Served
from promptq.worker.text.tokenizer import ByteTokenizer
from tests.support.model_free import BY_ITSELF, finished, running_worker
from tests.support.requests import async_log_of, async_put, until_tokens
from tests.support.roles import as_role
from tests.worker.engine.tiny_models import VOCAB_SIZE, generate, make_model, save_model

FAMILIES = ["llama", "qwen3", "gpt2", "mistral", "gemma3_text", "mixtral", "qwen3_5_text"]
BLOCK_SIZE = 4
MAX_TOKENS = 24


def make_prompts(rng: random.Random) -> list[list[int]]:
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(19)]
    prompts = []
    for n in range(12):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        prompts.append(prefix + own if n % 2 else own)
    return prompts


def served(directory: Path, *, num_blocks: int) -> Served:
    options = LoadOptions(device="cpu", dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=6)
    layout = load_runner(str(directory), options).kv_layout
    memory = num_blocks * BLOCK_SIZE * layout.bytes_per_token + layout.state_bytes
    runner = load_runner(str(directory), replace(options, kv_cache_memory=memory))
    engine = LLMEngine(runner, max_num_seqs=6, max_num_batched_tokens=24, prefill_chunk=7)
    identity = ModelIdentity(directory.name, directory.name)
    return Served(engine, ByteTokenizer(), identity, frozenset(), "cpu", "float32")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("num_blocks", [400, 30], ids=["with-room", "with-preemption"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_are_those_of_generate(
    family: str, num_blocks: int, redis_url: str, tmp_path: Path
) -> None:
    rng = random.Random(11)
    is_tight = num_blocks == 30
    directory = save_model(tmp_path / family, family, 11)
    model = make_model(family, 11)
    prompts = make_prompts(rng)
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 6, "the models must tell prompts apart"

    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as client:
        queue = AsyncRequestQueue(client)

        async def put(prompt: list[int], **fields: Any) -> str:
            return await async_put(queue, prompt=prompt, temperature=0.0, ignore_eos=True, **fields)

        ids: list[str] = []
        leavers: list[str] = []

        async def put_all(pause: float) -> None:
            for prompt in prompts:
                ids.append(await put(prompt, max_tokens=MAX_TOKENS))
                leavers.append(await put(prompt[::-1], max_tokens=60))
                await asyncio.sleep(rng.random() * pause)
                if rng.random() < 0.7:
                    await queue.cancel(rng.choice(leavers))

        if is_tight:
            # The queue expects one token of each, so more are let in than there is room for.
            await client.lpush("promptq:{default}:outputs", *["0 1"] * 128)
            await put_all(pause=0)
        async with running_worker(redis_url, served(directory, num_blocks=num_blocks)) as worker:
            if is_tight:
                await finished(queue, ids[0])  # by then the others have grown beyond the room
            else:
                await put_all(pause=0.02)
            for request_id in leavers:
                await queue.cancel(request_id)
            results = [await finished(queue, request_id) for request_id in ids]
            for result, tokens in zip(results, expected, strict=True):
                assert result["token_ids"] == tokens
            stats = worker.engine.stats
            assert stats.cached_tokens > 0, "prefixes were shared"
            if is_tight:
                assert stats.num_preemptions > 0
            else:
                assert (stats.num_preemptions, stats.recomputed_tokens) == (0, 0)


async def test_another_worker_computes_the_states_again(redis_url: str, tmp_path: Path) -> None:
    """A state never leaves a worker: the next one computes it from the tokens."""
    family = "granitemoehybrid"
    directory = save_model(tmp_path / family, family, 11)
    model, prompts = make_model(family, 11), make_prompts(random.Random(12))[:4]
    expected = [generate(model, prompt, 60) for prompt in prompts]
    first, second = served(directory, num_blocks=400), served(directory, num_blocks=400)
    async with redis.asyncio.Redis.from_url(as_role("", redis_url)) as client:
        queue = AsyncRequestQueue(client)
        async with running_worker(redis_url, first, drain_seconds=0.0, **BY_ITSELF):
            fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}
            ids = [await async_put(queue, prompt=prompt, **fields) for prompt in prompts]
            await until_tokens(queue, ids[0], 5)
        async with running_worker(redis_url, second, **BY_ITSELF):
            results = [await finished(queue, request_id) for request_id in ids]
        assert [result["token_ids"] for result in results] == expected
        events = await async_log_of(queue, ids[0])
        assert {event["attempt"] for event in events} == {1, 2}
