"""OpenAI's client of a gateway that keeps files, and batches for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
import redis.asyncio

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batch_store.files import FileStore
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.producer.gateway.living import live_gateway
from tests.producer.playing import KEYS
from tests.support.model_free import text_of
from tests.support.roles import as_role

NUM_TOKENS = 5


def line(number: int, **changes: Any) -> dict[str, Any]:
    """A sound line, whose seed decides the model-free engine's answer."""
    body = {"prompt": f"line {number}", "seed": number, "max_tokens": NUM_TOKENS}
    sound = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return sound | changes


def write_lines(path: Path, lines: list[dict[str, Any] | str]) -> Path:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Lines by their custom id, each of which must come once."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {item["custom_id"]: item for item in lines}
    assert len(found) == len(lines), "a line was written twice"
    return found


def texts_in(path: Path) -> dict[str, str]:
    """The answers' texts by custom id."""
    return {
        custom_id: item["response"]["body"]["choices"][0]["text"]
        for custom_id, item in read_lines(path).items()
    }


def expected_texts(numbers: range) -> dict[str, str]:
    return {f"id-{number}": text_of(number, NUM_TOKENS) for number in numbers}


def attempts(server: redis.Redis) -> list[int]:
    """How often each request that the server knows was begun."""
    keys = server.keys(KEYS.request("*"))
    return [int(server.hget(key, "attempt") or 0) for key in keys]


def keys_of(server: redis.Redis, prompt: str) -> list[bytes]:
    """Hashes of requests with this prompt."""
    wanted = f'"prompt":"{prompt}"'.encode()
    return [key for key in server.keys(KEYS.request("*")) if wanted in server.hget(key, "payload")]


def pass_lease_time(connection: redis.Redis, batch_id: str) -> None:
    """Makes everything that a killed process held run out."""
    connection.delete(KEYS.batch_runner(batch_id), KEYS.jobs_leader)
    give_up(connection, batch_id)


def give_up(connection: redis.Redis, batch_id: str) -> None:
    """Ends the job as RQ does when it notices that the process of a batch has died."""
    connection.hset(f"rq:job:promptq-{batch_id}", "status", "failed")


async def finished_batch(url: str, batch_id: str) -> Any:
    async with redis.asyncio.Redis.from_url(as_role("gateway", url)) as connection:
        while True:
            record = await Batches(AsyncRequestQueue(connection)).get(batch_id)
            if record.is_final:
                return record
            await asyncio.sleep(0.05)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        await asyncio.sleep(0.05)


async def upload(client: openai.AsyncOpenAI, lines: list[Any]) -> str:
    text = "".join(it if isinstance(it, str) else json.dumps(it) + "\n" for it in lines)
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return file.id


async def create(client: openai.AsyncOpenAI, lines: list[Any]) -> openai.types.Batch:
    return await client.batches.create(
        input_file_id=await upload(client, lines),
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"my": "batch"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )


def add_batch(url: str, files: Path, tmp_path: Path, lines: list[Any]) -> str:
    """Adds a batch as the gateway does."""
    with write_lines(tmp_path / "in.jsonl", lines).open("rb") as stream:
        stored = FileStore(files).add(stream, filename="in.jsonl", purpose="batch")
    batch = new_batch("/v1/completions", stored.id, ApiKey(name="k"))

    async def add() -> None:
        async with redis.asyncio.Redis.from_url(url) as connection:
            await Batches(AsyncRequestQueue(connection)).add(batch)

    with ThreadPoolExecutor() as pool:
        pool.submit(asyncio.run, add()).result()
    return batch.id


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    with live_gateway(redis_url, files_dir=tmp_path / "files") as gateway:
        base_url = gateway.base_url
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
            yield client
