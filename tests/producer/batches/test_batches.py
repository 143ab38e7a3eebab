"""Batches of a gateway, from the upload to the answers."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import openai
import pytest
import redis
import redis.asyncio

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batches import batch_job
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.common import read_settings_of
from tests.producer.batches.conftest import (
    NUM_TOKENS,
    create,
    ended,
    expected_texts,
    line,
    texts_in,
    upload,
)
from tests.producer.playing import KEYS, HandWorker, Start
from tests.support.model_free import running_worker
from tests.support.processes import until_ready
from tests.support.roles import as_role
from tests.support.waiting import async_until


async def test_batches_from_upload_to_answers(
    client: openai.AsyncOpenAI, redis_url: str, tmp_path: Path, start: Start
) -> None:
    """One that completes with broken lines, one that is cancelled, one whose window ends, one that
    cannot be run."""
    files = tmp_path / "files"
    process = start("jobs", PROMPTQ_FILES_DIR=str(files), PROMPTQ_BATCH_IN_FLIGHT="4")
    await until_ready(process)
    good = [line(n) for n in range(12)]
    batch = await create(client, [*good, "{broken\n", line(99, url="/v1/chat/completions")])
    assert (batch.status, batch.metadata) == ("validating", {"my": "batch"})
    empty = await create(client, ["\n"])
    async with running_worker(redis_url):
        batch, empty = await ended(client, batch.id), await ended(client, empty.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 14, "completed": 12, "failed": 2}
    assert batch.usage is not None
    assert batch.usage.output_tokens == 12 * NUM_TOKENS
    assert batch.usage.input_tokens > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = await client.files.retrieve(batch.output_file_id)
    assert answers.expires_at == answers.created_at + 7200
    assert batch.completed_at is not None
    output = tmp_path / "output.jsonl"
    output.write_text((await client.files.content(batch.output_file_id)).text)
    assert texts_in(output) == expected_texts(range(12))
    errors = (await client.files.content(batch.error_file_id)).text.splitlines()
    assert [json.loads(it)["error"]["code"] for it in errors] == [
        "invalid_json_line", "invalid_url",
    ]  # fmt: skip
    assert empty.status == "failed"
    assert empty.errors is not None
    assert empty.errors.data is not None
    assert empty.errors.data[0].code == "empty_file"
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)

    with redis.Redis.from_url(as_role("", redis_url)) as server:
        waiting = await create(client, good)
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        [score] = {int(server.hget(key, "priority")) for key in waiting_keys(server)}
        assert score == 100, "batches come after what people wait for"
        assert (await client.batches.cancel(waiting.id)).status == "cancelling"
        waiting = await ended(client, waiting.id)
        assert (waiting.status, waiting.output_file_id) == ("cancelled", None)
        assert server.zcard(KEYS.pending) == 0
        assert waiting.error_file_id is not None
        errors = (await client.files.content(waiting.error_file_id)).text.splitlines()
        assert [json.loads(it)["error"]["code"] for it in errors] == ["batch_cancelled"] * 12
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        late = new_batch("/v1/completions", await upload(client, good), ApiKey(name="k"))
        late.expires_at = late.created_at + 1
        await Batches(AsyncRequestQueue(connection)).add(late)
    expired = await ended(client, late.id)
    assert expired.status == "expired"
    assert expired.request_counts is not None
    assert expired.request_counts.failed == 12
    assert expired.error_file_id is not None
    errors = (await client.files.content(expired.error_file_id)).text.splitlines()
    assert {json.loads(it)["error"]["code"] for it in errors} == {"batch_expired"}
    assert {json.loads(it)["custom_id"] for it in errors} == {f"id-{n}" for n in range(12)}

    page = await client.batches.list(limit=3)
    assert [it.id for it in page.data] == [expired.id, waiting.id, empty.id]
    assert [it.id async for it in client.batches.list(limit=1)] == [
        expired.id, waiting.id, empty.id, batch.id,
    ]  # fmt: skip
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait) == 0
    assert list((files / "running").iterdir()) == []


async def test_a_batch_reports_its_progress(
    client: openai.AsyncOpenAI,
    redis_url: str,
    tmp_path: Path,
    own_worker: HandWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it runs, counts and usage of what is done so far."""
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(tmp_path / "files"))
    monkeypatch.setenv("PROMPTQ_BATCH_IN_FLIGHT", "3")
    batch = await create(client, ["{broken\n", *(line(n) for n in range(5))])
    running = asyncio.create_task(
        asyncio.to_thread(batch_job.run_batch_job, read_settings_of(JobsSettings), batch.id)
    )
    for done, more in ((0, 2), (2, 3)):
        while (now := await client.batches.retrieve(batch.id)).status == "validating" or (
            now.request_counts is not None and now.request_counts.completed < done
        ):
            await asyncio.sleep(0.01)
        assert (now.status, now.completed_at) == ("in_progress", None)
        assert now.in_progress_at is not None
        assert now.request_counts is not None
        assert now.request_counts.total == 6
        assert now.request_counts.completed == done
        assert now.usage is not None
        assert now.usage.output_tokens == done * len("hi")
        for _ in range(more):
            await async_until(lambda: own_worker.redis.zcard(KEYS.pending) > 0)
            own_worker.finish(own_worker.take(), "hi")
    assert now.request_counts.failed == 1
    assert await running == "completed"


def waiting_keys(server: redis.Redis) -> list[str]:
    return [KEYS.request(raw.decode()) for raw in server.zrange(KEYS.pending, 0, -1)]


async def test_ids_that_are_no_batch(client: openai.AsyncOpenAI, redis_url: str) -> None:
    """Whatever other keys are called, and whatever strangers wrote."""
    batch = await create(client, [line(0)])
    wrong_type, garbled = f"batch_{1:032x}", f"batch_{2:032x}"
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        server.set(KEYS.batch_runner(batch.id), "a")
        server.set(KEYS.batch(wrong_type), "a")
        server.hset(KEYS.batch(garbled), mapping={"id": "1", b"\xff": b"\xff"})
        server.hset(KEYS.batch(batch.id), b"\xff", b"\xff")
        listed = {b"caf\xe9": 1, f"{batch.id}:runner": 2, garbled: 3, wrong_type: 4}
        server.zadd(KEYS.batches_of(""), listed)
    for batch_id in (f"{batch.id}:runner", "batch_no", wrong_type, garbled):
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch_id)
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel(batch_id)
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.batches.list(after=f"{batch.id}:runner")
    assert [it.id async for it in client.batches.list()] == [batch.id]
