"""Batches whose processes are killed, or of which RQ forgot."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import openai
import pytest
import redis
import redis.asyncio

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batch_store.files import FileStore
from promptq.producer.jobs.rq_jobs import batch_queue, enqueue_batch
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.batches.conftest import (
    NUM_TOKENS,
    add_batch,
    attempts,
    create,
    ended,
    expected_texts,
    finished_batch,
    line,
    pass_lease_time,
    texts_in,
    write_lines,
)
from tests.producer.playing import KEYS, HandWorker, Start
from tests.producer.webhooks.receiving import receiver
from tests.support.model_free import running_worker
from tests.support.processes import family_of, is_running, kill_all, running, until_ready
from tests.support.roles import as_role, bring_in_roles
from tests.support.waiting import async_until


async def test_everything_is_killed_and_restarted(tmp_path: Path, start: Start) -> None:
    """The jobs are killed in the midst of a batch, the server after them; the next ones go on, and
    no line runs twice. Told to stop, they do so at once, and the batch goes on later too. Of jobs
    whose parent alone is killed nothing is left."""
    files, output = tmp_path / "files", tmp_path / "output.jsonl"
    settings = {"PROMPTQ_FILES_DIR": str(files), "PROMPTQ_BATCH_IN_FLIGHT": "5"}
    settings["PROMPTQ_WEBHOOK_ALLOW_PRIVATE"] = "1"
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(60)])
    with source.open("rb") as stream:
        stored = FileStore(files).add(stream, filename="in.jsonl", purpose="batch")
    server = EmbeddedServer(data_dir=tmp_path / "data")
    bring_in_roles(server.url)
    try:
        url, port = server.url, server.port
        batch = new_batch("/v1/completions", stored.id, ApiKey(name="k"))
        async with redis.asyncio.Redis.from_url(url) as connection:
            await Batches(AsyncRequestQueue(connection)).add(batch)
        first = start("jobs", url=url, **settings)
        with redis.Redis.from_url(as_role("", url)) as connection:
            await async_until(lambda: connection.zcard(KEYS.pending) == 5)
            kill_all(first.pid)
            first.wait()
        server.stop()
        server = EmbeddedServer(port, tmp_path / "data", password=server.password)
        bring_in_roles(server.url)
        running = files / "running" / f"{batch.id}.output.jsonl"
        with redis.Redis.from_url(as_role("", url)) as connection, receiver() as receiving:
            pass_lease_time(connection, batch.id)
            with Client(url) as client:
                client.enqueue("a", max_tokens=2, webhook_url=receiving.url("/ok"))
            second = start("jobs", url=url, **settings)
            async with running_worker(url):
                await async_until(running.exists)
                await async_until(lambda: running.read_bytes().count(b"\n") >= 5)
                second.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(second.wait) == 0
                assert not connection.exists(KEYS.batch_runner(batch.id))
                assert running.read_bytes().count(b"\n") < 60
                third = start("jobs", url=url, **settings)
                record = await finished_batch(url, batch.id)
                await async_until(lambda: len(receiving.calls) == 1)
            assert attempts(connection) == [1] * 61
        assert (record.status, record.completed, record.failed) == ("completed", 60, 0)
        assert record.usage.completion_tokens == 60 * NUM_TOKENS
        answers = FileStore(files).get(record.output_file_id or "", "")
        output.write_bytes(FileStore(files).path(answers).read_bytes())
        assert texts_in(output) == expected_texts(range(60))
        family = family_of(third.pid)
        third.kill()
        third.wait()
        await async_until(lambda: not any(map(is_running, family)))
    finally:
        server.stop()


async def test_each_batch_is_handed_out_once(redis_url: str, tmp_path: Path, start: Start) -> None:
    """Also while its run has no lease yet, or none any longer; what is no batch is struck off."""
    files, rq = tmp_path / "files", "promptq-default-batches"
    process = start("jobs", PROMPTQ_FILES_DIR=str(files))
    await until_ready(process)
    batches = [add_batch(redis_url, files, tmp_path, ["{broken"]) for _ in range(8)]
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        garbled = f"batch_{0:032x}"
        server.hset(KEYS.batch(garbled), mapping={"status": "[", b"\xff": b"\xff"})
        server.sadd(KEYS.unfinished_batches, b"caf\xe9", "batch_no", garbled)
        names = [f"rq:queue:{rq}", f"rq:queue:{rq}:intermediate", f"rq:wip:{rq}"]
        await async_until(lambda: not server.exists(KEYS.unfinished_batches, *names))
        runs = [server.xlen(f"rq:results:promptq-{batch_id}") for batch_id in batches]
    assert runs == [1] * 8
    process.terminate()
    assert await asyncio.to_thread(process.wait) == 0


async def test_a_batch_stops_where_it_is_though_rq_forgot_it(
    redis_url: str, tmp_path: Path, start: Start, own_worker: HandWorker
) -> None:
    """RQ keeps what it knows of a job for a time only. Of the processes none is left, and the next
    ones go on."""
    server, files = own_worker.redis, tmp_path / "files"
    settings = {"PROMPTQ_FILES_DIR": str(files), "PROMPTQ_BATCH_IN_FLIGHT": "3"}
    process = start("jobs", **settings)
    await until_ready(process)
    batch_id = add_batch(redis_url, files, tmp_path, [line(n) for n in range(10)])
    await async_until(lambda: server.zcard(KEYS.pending) == 3)
    family = family_of(process.pid)
    server.delete(f"rq:job:promptq-{batch_id}")
    process.terminate()
    assert await asyncio.to_thread(process.wait) == 0
    assert not any(map(is_running, family))
    assert not server.exists(KEYS.batch_runner(batch_id)), "it stopped in order"
    start("jobs", **settings)
    async with running_worker(redis_url):
        record = await finished_batch(redis_url, batch_id)
    assert (record.status, record.completed) == ("completed", 10)
    assert attempts(server) == [1] * 10


STOPPED_AT_THE_FORK = """
import os, signal
from promptq.producer.jobs import rq_jobs
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.settings.common import read_settings_of

fork = os.fork
reading, writing = os.pipe()

def stop():
    os.close(writing)
    os.kill(os.getpid(), signal.SIGTERM)

def fork_and_stop():
    if WHEN == "before":
        stop()
    pid = fork()
    if WHEN == "after":
        stop() if pid else os.close(writing)
    return pid

os.fork = fork_and_stop
settings = read_settings_of(JobsSettings)
queue = rq_jobs.batch_queue("default", rq_jobs.open_jobs_redis(settings))
rq_jobs.run_worker(queue, settings, stop_pipe=reading)
"""
"""Runs batches until it is stopped, while it forks the process of the first."""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_batch_stops_that_began_while_its_worker_was_stopped(
    when: str, redis_url: str, tmp_path: Path, environment: dict[str, str], own_worker: HandWorker
) -> None:
    """If it did not, it would end only when it expires."""
    server, files = own_worker.redis, tmp_path / "files"
    batch_id = add_batch(redis_url, files, tmp_path, [line(0)])
    server.hset(KEYS.batch(batch_id), "expires_at", int(time.time()) + 60)
    enqueue_batch(batch_queue("default", server), "default", batch_id)
    environment |= {"PROMPTQ_REDIS_URL": as_role("jobs", redis_url)}
    environment |= {"PROMPTQ_FILES_DIR": str(files)}
    script = STOPPED_AT_THE_FORK.replace("WHEN", repr(when))
    with running(sys.executable, "-c", script, env=environment) as process:
        assert await asyncio.to_thread(process.wait) == 0
    assert server.hget(KEYS.batch(batch_id), "status") == b'"in_progress"'
    assert not server.exists(KEYS.batch_runner(batch_id)), "it stopped in order"


async def test_a_batch_that_began_owns_its_input(
    client: openai.AsyncOpenAI,
    redis_url: str,
    tmp_path: Path,
    start: Start,
    own_worker: HandWorker,
) -> None:
    """Its file may be deleted, and the jobs start again; of one that did not begin it may not.
    Nothing is left of it at its end, half a copy that a killed process made included."""
    server, files = own_worker.redis, tmp_path / "files"
    settings = {"PROMPTQ_FILES_DIR": str(files), "PROMPTQ_BATCH_IN_FLIGHT": "3"}
    process = start("jobs", **settings)
    await until_ready(process)
    begun = await create(client, [line(n) for n in range(10)])
    await async_until(lambda: server.zcard(KEYS.pending) == 3)
    own_worker.finish(own_worker.take(), "hi")
    await client.files.delete(begun.input_file_id)
    process.terminate()
    assert await asyncio.to_thread(process.wait) == 0
    (files / "running" / f"{begun.id}.input.jsonl.0.new").write_bytes(b"half a li")
    late = await create(client, [line(n) for n in range(10)])
    await client.files.delete(late.input_file_id)
    process = start("jobs", **settings)
    async with running_worker(redis_url):
        begun, late = await ended(client, begun.id), await ended(client, late.id)
    assert begun.status == "completed"
    assert begun.request_counts is not None
    assert begun.request_counts.completed == 10
    assert (late.status, late.output_file_id) == ("failed", None)
    assert late.errors is not None
    assert late.errors.data is not None
    assert late.errors.data[0].code == "input_file_missing"
    assert list((files / "running").iterdir()) == []
