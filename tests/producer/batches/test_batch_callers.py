"""Fields of a batch's lines, and ends of a batch. The tests call the job like RQ."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import (
    WINDOW_SECONDS,
    Batches,
    BatchRecord,
    new_batch,
)
from promptq.producer.batch_store.files import FileStore
from promptq.producer.batch_store.input_file import LineReader, request_id_of
from promptq.producer.batches.batch_job import run_batch_job
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.protocol.request import NewRequest, Request
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.settings.common import read_settings_of
from tests.producer.batches.conftest import NUM_TOKENS, keys_of, line, read_lines, write_lines
from tests.producer.playing import KEYS, HandWorker
from tests.support.model_free import running_worker
from tests.support.roles import as_role
from tests.support.waiting import async_until

PLAIN = ApiKey(name="plain")
BATCH_RATES = "promptq:{default}:rate:web:batches"


@pytest.fixture
def files(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(tmp_path / "files"))
    monkeypatch.setenv("PROMPTQ_BATCH_IN_FLIGHT", "4")
    return FileStore(tmp_path / "files")


class Batch:
    """A batch that is written down, and can be run."""

    def __init__(
        self, url: str, files: FileStore, caller: ApiKey, lines: list[Any], window: str = "24h"
    ) -> None:
        self._url = url
        self._files = files
        source = write_lines(files.folder.with_name("in.jsonl"), lines)
        with source.open("rb") as stream:
            stored = files.add(stream, filename="in", purpose="batch", tenant=caller.tenant or "")
        self.record = new_batch("/v1/completions", stored.id, caller, completion_window=window)

    async def run(self) -> BatchRecord:
        await self.tell(lambda batches: batches.add(self.record))
        await asyncio.to_thread(run_batch_job, read_settings_of(JobsSettings), self.record.id)
        return await self.tell(lambda batches: batches.get(self.record.id))

    async def tell(self, call: Callable[[Batches], Any]) -> Any:
        async with redis.asyncio.Redis.from_url(self._url) as connection:
            return await call(Batches(AsyncRequestQueue(connection)))

    def written(self, file_id: str | None, tenant: str = "") -> dict[str, Any]:
        return read_lines(self._files.path(self._files.get(file_id or "", tenant)))


async def test_a_line_may_what_its_key_may(redis_url: str, files: FileStore) -> None:
    """A line that the gateway would refuse is in the error file, with the gateway's answer."""
    caller = ApiKey(name="web", tenant="mine", highest_priority=200, tokens_per_minute=10_000)

    def asking(number: int, **fields: Any) -> dict[str, Any]:
        sound = line(number)
        return sound | {"body": sound["body"] | fields}

    lines = [
        asking(0), asking(1, priority=200, tenant="mine"), asking(2, priority=199),
        asking(3, tenant="other"), asking(4, prompt="x" * 50_000), asking(5, model="no-such"),
        asking(6, temperature=-1),
    ]  # fmt: skip
    batch = Batch(redis_url, files, caller, lines)
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        async with running_worker(redis_url):
            record = await batch.run()
        for prompt in ("line 0", "line 1"):
            [key] = keys_of(server, prompt)
            assert server.hmget(key, "tenant", "priority") == [b"mine", b"200"]
        assert keys_of(server, "line 2") == [], "it never was in the queue"
    assert (record.status, record.completed, record.failed) == ("completed", 2, 5)
    assert set(batch.written(record.output_file_id, "mine")) == {"id-0", "id-1"}
    errors = batch.written(record.error_file_id, "mine")
    refused = {
        name: (it["response"]["status_code"], it["response"]["body"]["error"]["param"])
        for name, it in errors.items()
    }
    assert refused == {
        "id-2": (403, "priority"), "id-3": (403, "tenant"), "id-4": (429, None),
        "id-5": (404, "model"), "id-6": (400, "temperature"),
    }  # fmt: skip


async def test_lines_wait_for_their_keys_rates(redis_url: str, files: FileStore) -> None:
    """On an account of their own, and none of them fails."""
    caller = ApiKey(name="web", requests_per_minute=600)
    batch = Batch(redis_url, files, caller, [line(n) for n in range(6)])
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        seconds, _ = server.time()
        full_at = (seconds + 61) * 1000
        server.hset(BATCH_RATES, "requests", full_at)
        async with running_worker(redis_url):
            record = await batch.run()
        assert (record.completed, record.failed) == (6, 0)
        assert server.time()[0] * 1000 + 1000 >= full_at + 600 - 60_000, "there was no room before"
        assert int(server.hget(BATCH_RATES, "requests")) == full_at + 600
        assert not server.exists("promptq:{default}:rate:web"), (
            "other calls of the key are not kept waiting"
        )


async def test_what_lines_make_is_charged_to_their_keys_rate(
    redis_url: str, files: FileStore
) -> None:
    """On the same account as their prompts, and exactly."""
    caller = ApiKey(name="web", tokens_per_minute=10_000)
    batch = Batch(redis_url, files, caller, [line(n) for n in range(6)])
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        seconds, _ = server.time()
        full_at = (seconds + 50) * 1000  # not full meanwhile, so that all adds up
        server.hset(BATCH_RATES, "tokens", full_at)
        async with running_worker(redis_url):
            record = await batch.run()
        accounts = [server.hget(key, "account") for key in server.keys(KEYS.request("*"))]
        assert accounts == [b"10000 web:batches"] * 6
        charged = (float(server.hget(BATCH_RATES, "tokens")) - full_at) / 6
        assert not server.exists("promptq:{default}:rate:web")
    prompts = sum(
        len(json.dumps(line(n)["body"] | {"request_id": "cmpl-" + "x" * 36, "priority": 100})) // 4
        for n in range(6)
    )
    assert record.usage.completion_tokens == 6 * NUM_TOKENS
    assert charged == pytest.approx(prompts + record.usage.completion_tokens, abs=0.01)


async def test_a_batch_is_cancelled_in_its_midst(
    redis_url: str, files: FileStore, own_worker: HandWorker
) -> None:
    """Answers until then are kept, also those that end during the cancel."""
    batch = Batch(redis_url, files, PLAIN, [line(n) for n in range(12)])
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        running = asyncio.create_task(batch.run())
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        own_worker.finish(own_worker.take(), "first")
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        cut, late = own_worker.take(), own_worker.take()
        await batch.tell(lambda batches: batches.cancel(batch.record.id, ("",)))
        await async_until(lambda: server.zcard(KEYS.pending) == 0)
        own_worker.send(cut, "x")
        server.hdel(KEYS.request(late.request_id), "cancelled")
        own_worker.finish(late, "late")
        record = await running
    assert (record.status, record.completed, record.failed) == ("cancelled", 2, 10)
    texts = [
        it["response"]["body"]["choices"][0]["text"]
        for it in batch.written(record.output_file_id).values()
    ]
    assert sorted(texts) == ["first", "late"]
    errors = batch.written(record.error_file_id)
    assert {it["error"]["code"] for it in errors.values()} == {"batch_cancelled"}


async def test_a_batchs_window_ends_in_its_midst(
    redis_url: str, files: FileStore, own_worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers until then are kept; waiting and running lines are not finished."""
    now, passed = time.time, [0]
    monkeypatch.setattr(time, "time", lambda: now() + passed[0])
    batch = Batch(redis_url, files, PLAIN, [line(n) for n in range(12)])
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        running = asyncio.create_task(batch.run())
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        [request] = {server.hget(key, "payload") for key in keys_of(server, "line 0")}
        left_ms = (batch.record.expires_at - now()) * 1000
        assert left_ms <= json.loads(request)["deadline_ms"] <= WINDOW_SECONDS * 1000
        own_worker.finish(own_worker.take(), "first")
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        cut = own_worker.take()
        passed[0] = WINDOW_SECONDS
        await async_until(lambda: server.zcard(KEYS.pending) == 0)
        own_worker.send(cut, "x")
        record = await running
    assert (record.status, record.completed, record.failed) == ("expired", 1, 11)
    assert record.expired_at is not None
    [answer] = batch.written(record.output_file_id).values()
    assert answer["response"]["body"]["choices"][0]["text"] == "first"
    errors = batch.written(record.error_file_id)
    assert {it["error"]["code"] for it in errors.values()} == {"batch_expired"}
    assert {*errors, answer["custom_id"]} == {f"id-{n}" for n in range(12)}


async def test_what_a_killed_process_enqueued_is_cancelled_too(
    redis_url: str, files: FileStore, own_worker: HandWorker
) -> None:
    batch = Batch(redis_url, files, PLAIN, [line(n) for n in range(12)])
    reader = LineReader()
    for number in range(1, 4):
        parsed = reader.parse(number, json.dumps(line(number)).encode())
        request = Request.build({"prompt": "a"})
        own_worker.queue.enqueue([NewRequest(request_id_of(batch.record.id, parsed), request)])
    batch.record.cancelling_at = 1
    record = await batch.run()
    assert (record.status, record.failed) == ("cancelled", 12)
    assert own_worker.redis.zcard(KEYS.pending) == 0


async def test_a_shorter_window_and_a_service_tier(
    redis_url: str, files: FileStore, own_worker: HandWorker
) -> None:
    """Lines with a window run by their deadline. A line's tier precedes the batches' priority."""
    plain, flex = line(0), line(1)
    flex["body"]["service_tier"] = "flex"
    batch = Batch(redis_url, files, PLAIN, [plain, flex], window="2h")
    assert batch.record.expires_at - batch.record.created_at == 7200
    running = asyncio.create_task(batch.run())
    priorities = {}
    for _ in range(2):
        claim = await asyncio.to_thread(own_worker.take_next)
        payload = json.loads(claim.payload)
        priorities[payload["prompt"]] = payload["priority"]
        waits_ms = claim.score - payload["priority"] * 60_000 - time.time() * 1000
        assert 100 * 60_000 < waits_ms < 110 * 60_000, "10 minutes before the window's end"
        assert payload["completion_window"] == "2h"
        own_worker.finish(claim, "x")
    record = await running
    assert priorities == {"line 0": 100, "line 1": 10}
    assert (record.status, record.completed) == ("completed", 2)
    assert record.to_api()["completion_window"] == "2h"
    answers = batch.written(record.output_file_id).values()
    tiers = sorted(each["response"]["body"]["service_tier"] for each in answers)
    assert tiers == ["flex", "flex"]


async def test_lines_are_expected_to_be_as_long_as_the_answers_before(
    redis_url: str, files: FileStore, own_worker: HandWorker
) -> None:
    """A line may have another guess. Once the queue runs short requests first, it knows them."""
    own_worker.redis.hset(KEYS.config, "shortest_first_ms", 20_000)
    lines = [line(number) for number in range(16)]
    lines[15]["body"]["expected_tokens"] = 4
    running = asyncio.create_task(Batch(redis_url, files, PLAIN, lines).run())
    guesses = []
    for _ in range(16):
        claim = await asyncio.to_thread(own_worker.take_next)
        guesses.append(own_worker.redis.hget(KEYS.request(claim.request_id), "expected_tokens"))
        own_worker.finish(claim, "xxx")
    assert (await running).completed == 16
    assert guesses[:8] == [None] * 8, "there were too few answers"
    assert guesses[12:] == [b"3", b"3", b"3", b"4"]
