"""Real processes of the jobs that are killed, and others that go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batch_store.files import FileStore
from promptq.shared.protocol.request import RequestState
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.producer.batches.conftest import (
    attempts,
    finished_batch,
    give_up,
    line,
    read_lines,
    write_lines,
)
from tests.producer.playing import KEYS, HandWorker, Start
from tests.producer.webhooks.receiving import Receiver, ask, receiver
from tests.support.model_free import running_worker
from tests.support.processes import kill_all, until_ready
from tests.support.roles import as_role
from tests.support.servers import OwnServer
from tests.support.waiting import async_until

REAP = "rq:job:promptq-default-upkeep-reap"


async def test_webhooks_and_upkeep_after_restarts(tmp_path: Path, start: Start) -> None:
    """Of jobs and server, both killed: a webhook that waits for its next attempt is sent again,
    what ended while no jobs ran is told, and what is late is ended. Then the server alone: the jobs
    stay, and go on."""
    settings = {"PROMPTQ_FILES_DIR": str(tmp_path), "PROMPTQ_WEBHOOK_ALLOW_PRIVATE": "1"}
    settings["PROMPTQ_LEASE_MS"] = "100"
    waiting = KEYS.webhooks_waiting
    with OwnServer(tmp_path / "server") as server, receiver() as receiving:
        url = as_role("jobs", server.url)
        with server.client() as connection:
            first = start("jobs", url=url, **settings)
            end_one(connection, receiving, "/later")
            await async_until(lambda: b'"attempts":1' in (connection.hvals(waiting) or [b""])[0])
            await async_until(lambda: connection.hget(REAP, "status") == b"finished")
            kill_all(first.pid)
            first.wait()
        server.kill()
        server.start()
        with server.client() as connection:
            hand = end_one(connection, receiving, "/meanwhile")
            ask(hand.queue, "late", receiving.url("/late"), deadline_ms=1)
            assert [path for path, _, _ in receiving.calls] == ["/later"]
            connection.hset(waiting, "/later", '{"attempts":1,"due":1}')
            connection.delete(KEYS.jobs_leader)  # as if its time had run out
            second = start("jobs", url=url, **settings)
            wanted = ["/late", "/later", "/later", "/meanwhile"]
            await async_until(lambda: sorted(path for path, _, _ in receiving.calls) == wanted)
            assert hand.queue.state("late") is RequestState.EXPIRED
            await async_until(lambda: connection.hlen(waiting) == 0)
        server.kill()
        server.start()
        with server.client() as connection:
            end_one(connection, receiving, "/after")
            await async_until(lambda: len(receiving.calls) == 5)
        assert second.poll() is None
        second.terminate()
        assert await asyncio.to_thread(second.wait) == 0


def end_one(connection: Any, receiving: Receiver, path: str) -> HandWorker:
    """Have a request end that tells a webhook of it."""
    hand = HandWorker(connection)
    ask(hand.queue, path, receiving.url(path))
    hand.finish(hand.take(), "hi")
    return hand


async def test_another_process_takes_over(
    redis_url: str, tmp_path: Path, start: Start, own_worker: HandWorker
) -> None:
    """From one that led and ran a batch, and is killed; whatever its lines were just doing, none
    runs twice."""
    files, server = tmp_path / "files", own_worker.redis
    settings = {"PROMPTQ_FILES_DIR": str(files), "PROMPTQ_BATCH_IN_FLIGHT": "5"}
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(20)])
    with source.open("rb") as stream:
        stored = FileStore(files).add(stream, filename="in.jsonl", purpose="batch")
    batch = new_batch("/v1/completions", stored.id, ApiKey(name="k"))
    written = files / "running" / f"{batch.id}.output.jsonl"
    held_for = {KEYS.jobs_leader: 5000, KEYS.batch_runner(batch.id): 15_000}  # ms, of docs/jobs.md

    first = start("jobs", **settings)
    await until_ready(first)
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        await Batches(AsyncRequestQueue(connection)).add(batch)
    await async_until(lambda: server.zcard(KEYS.pending) == 5)
    for _ in range(3):
        own_worker.finish(own_worker.take())
    await async_until(lambda: server.zcard(KEYS.pending) == 5)
    assert written.read_bytes().count(b"\n") == 3
    second = start("jobs", **settings)
    await until_ready(second)
    holders = {key: server.get(key) for key in held_for}
    running, ended = own_worker.take(), own_worker.take()

    kill_all(first.pid)
    first.wait()
    own_worker.finish(ended)
    for key, most in held_for.items():
        assert server.pttl(key) != -1
        assert server.pttl(key) <= most
        server.pexpire(key, 100)  # as if that time had passed
    give_up(server, batch.id)
    await async_until(lambda: all(server.get(key) not in (None, holders[key]) for key in holders))
    own_worker.finish(running)
    async with running_worker(redis_url):
        record = await finished_batch(redis_url, batch.id)
    assert (record.status, record.completed, record.failed) == ("completed", 20, 0)
    assert attempts(server) == [1] * 20
    answers = FileStore(files).get(record.output_file_id or "", "")
    assert set(read_lines(FileStore(files).path(answers))) == {f"id-{n}" for n in range(20)}
