"""Upkeep: the queue stays tidy with no worker alive, and a queue's minutes are kept."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import zlib
from contextlib import closing
from pathlib import Path

import pytest
import redis
import rq
from rq.exceptions import StopRequested

from promptq.producer.jobs import upkeep
from promptq.producer.jobs.rq_jobs import (
    REAP,
    SWEEP,
    ListedWorker,
    enqueue_upkeep,
    open_jobs_redis,
    run_worker,
    upkeep_queue,
)
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import NewRequest, Request, RequestState
from promptq.shared.server.embedded import EmbeddedServer
from promptq.shared.settings.common import read_settings_of
from tests.producer.playing import KEYS, HandWorker, Start
from tests.support.requests import put
from tests.support.roles import as_role, bring_in_roles
from tests.support.spoilt import SPOILT, TYPES, make_of_type


@pytest.fixture(autouse=True)
def settings(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(tmp_path))
    monkeypatch.setenv("PROMPTQ_LEASE_MS", "100")


def test_it_reaps_with_no_worker_alive(own_worker: HandWorker) -> None:
    """Through RQ's worker: what a dead worker held goes back, what is late ends."""
    jobs = open_jobs_redis(read_settings_of(JobsSettings))
    queue = upkeep_queue("default", jobs)
    put(own_worker.queue, "held")
    own_worker.take()
    put(own_worker.queue, "late", deadline_ms=1)
    own_worker.redis.zadd(KEYS.leases, {"held": 1})
    for _ in range(2):
        enqueue_upkeep(queue, REAP, "default")
        enqueue_upkeep(queue, REAP, "default")
        assert queue.count == 1, "one at a time"
        run_worker(queue, read_settings_of(JobsSettings), burst=True)
        time.sleep(0.06)
    assert own_worker.queue.state("held") is RequestState.WAITING
    assert own_worker.queue.state("late") is RequestState.EXPIRED
    jobs.close()


def test_upkeep_goes_on_whatever_its_record_says(own_worker: HandWorker) -> None:
    """A worker that was killed leaves it started; a stranger may write anything."""
    jobs = open_jobs_redis(read_settings_of(JobsSettings))
    queue, record = upkeep_queue("default", jobs), "rq:job:promptq-default-upkeep-reap"
    for field, value in (
        ("status", "started"),
        ("status", "x"),
        ("origin", "x"),
        ("data", b"\xff"),
    ):
        enqueue_upkeep(queue, REAP, "default")
        own_worker.redis.hset(record, field, value)
        run_worker(queue, read_settings_of(JobsSettings), burst=True)
        own_worker.redis.hset(record, field, value)
        own_worker.redis.delete(KEYS.upkeep)
        enqueue_upkeep(queue, REAP, "default")
        run_worker(queue, read_settings_of(JobsSettings), burst=True)
        assert own_worker.redis.exists(KEYS.upkeep), (field, value)
    jobs.close()


def test_releases_run_each_others_jobs(own_worker: HandWorker) -> None:
    """A job is what RQ makes with its own serializer for JSON."""
    jobs = open_jobs_redis(read_settings_of(JobsSettings))
    queue, job_id = upkeep_queue("default", jobs), "promptq-default-upkeep-reap"
    call = ["promptq.producer.jobs.upkeep.reap", None, ["default"], {}]
    enqueue_upkeep(queue, REAP, "default")
    record = own_worker.redis.hgetall(f"rq:job:{job_id}")
    assert own_worker.redis.lrange("rq:queue:promptq-default-upkeep", 0, -1) == [job_id.encode()]
    assert json.loads(zlib.decompress(record[b"data"])) == call
    assert (record[b"origin"], record[b"status"]) == (b"promptq-default-upkeep", b"queued")
    own_worker.redis.flushall()
    plain = rq.Queue(queue.name, connection=jobs, serializer="json")
    plain.enqueue_call(call[0], args=("default",), job_id=job_id, timeout=60)
    run_worker(queue, read_settings_of(JobsSettings), burst=True)
    assert own_worker.redis.hget(f"rq:job:{job_id}", "status") == b"finished"
    assert own_worker.redis.exists(KEYS.upkeep)
    jobs.close()


def test_a_queue_with_a_dot_in_its_name(own_worker: HandWorker) -> None:
    """Of which RQ knows none in what it calls a job; nor is it taken for that of another queue."""
    jobs = open_jobs_redis(read_settings_of(JobsSettings))
    for name in ("a.b", "a--b", "a-b"):
        enqueue_upkeep(upkeep_queue(name, jobs), REAP, name)
    assert len(own_worker.redis.keys("rq:job:*")) == 3
    run_worker(upkeep_queue("a.b", jobs), read_settings_of(JobsSettings, queue="a.b"), burst=True)
    assert own_worker.redis.exists(Keys("a.b").upkeep)
    jobs.close()


def test_workers_get_the_time_to_renew_after_an_outage(own_worker: HandWorker) -> None:
    """Where nobody looked for a while, the server may have been away: no lease counts as lost
    before half a lease has passed."""
    put(own_worker.queue, "held")
    claim = own_worker.take()
    upkeep.reap(read_settings_of(JobsSettings))
    time.sleep(0.06)
    now = own_worker.redis.time()[0] * 1000
    own_worker.redis.hset(KEYS.upkeep, "seen", now - 60_000)
    own_worker.redis.zadd(KEYS.leases, {"held": 1})
    assert "waits" in upkeep.reap(read_settings_of(JobsSettings))
    assert own_worker.queue.state("held") is RequestState.ACTIVE
    own_worker.send(claim, "x")
    own_worker.redis.zadd(KEYS.leases, {"held": 1})
    time.sleep(0.06)
    assert upkeep.reap(read_settings_of(JobsSettings)).startswith("1 returned")


def test_it_reaps_all_that_is_due(own_worker: HandWorker) -> None:
    """Also more than one call of the server does."""
    request = Request.build({"prompt": "a", "deadline_ms": 1})
    own_worker.queue.enqueue([NewRequest(f"late-{n}", request) for n in range(1001)])
    upkeep.reap(read_settings_of(JobsSettings))
    time.sleep(0.06)
    assert upkeep.reap(read_settings_of(JobsSettings)) == "0 returned, 1001 ended, 0 dead"
    assert own_worker.redis.zcard(KEYS.pending) == 0


def test_what_broken_batches_left_is_swept(redis_url: str, tmp_path: Path) -> None:
    """Through RQ's worker; what may still go on stays."""
    jobs = open_jobs_redis(read_settings_of(JobsSettings))
    running = tmp_path / "running"
    running.mkdir()
    for name in ("batch_old.output.jsonl", "batch_new.output.jsonl", "a_strangers.jsonl"):
        (running / name).touch()
    os.utime(running / "batch_old.output.jsonl", (1, 1))
    os.utime(running / "a_strangers.jsonl", (1, 1))
    enqueue_upkeep(upkeep_queue("default", jobs), SWEEP, "default")
    run_worker(upkeep_queue("default", jobs), read_settings_of(JobsSettings), burst=True)
    assert sorted(it.name for it in running.iterdir()) == [
        "a_strangers.jsonl",
        "batch_new.output.jsonl",
    ]
    jobs.close()


def test_a_stop_signal_in_the_midst_of_maintenance_is_heeded(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ's handler of the signal raises, wherever the worker is."""
    with closing(open_jobs_redis(read_settings_of(JobsSettings))) as jobs:
        queue = upkeep_queue("default", jobs)
        queue.release_maintenance_lock()  # type: ignore[no-untyped-call]
        worker = ListedWorker([queue], connection=jobs)

        def stop(*_: object) -> None:
            worker.request_stop(signal.SIGTERM, None)

        monkeypatch.setattr(jobs, "lrange", stop)
        with pytest.raises(StopRequested):
            worker.run_maintenance_tasks()


def test_jobs_stop_in_order_while_the_server_is_away(tmp_path: Path, start: Start) -> None:
    with EmbeddedServer() as server:
        bring_in_roles(server.url)
        process = start("jobs", url=as_role("jobs", server.url))
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("ready")
    said = ""
    while "Redis does not accept a call" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.terminate()
    said += process.communicate()[1]
    assert (process.returncode, "Traceback" in said) == (0, False), said


def test_minutes_are_rolled_up(redis_url: str) -> None:
    """Each whole minute once, however often it is asked for; the minute that runs is left."""
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        seconds, _ = server.time()
        minute = seconds // 60 * 60_000
        for at, running, p95 in ((0, 1, "5"), (5, 2, "9"), (55, 3, "")):
            fields = {"running": running, "finished": 2, "ttft_p95_ms": p95, "priorities": "{}"}
            server.xadd(KEYS.statistics, fields, id=f"{minute - 120_000 + at * 1000}-0")
        server.xadd(KEYS.statistics, {"running": 7}, id=f"{minute - 1}-0")
        server.xadd(KEYS.statistics, {"running": 9}, id=f"{minute}-0")
        assert upkeep.roll_up(read_settings_of(JobsSettings)) == "2 minutes"
        assert upkeep.roll_up(read_settings_of(JobsSettings)) == "0 minutes"
        assert server.xrange(KEYS.statistics_minutes) == [
            (
                f"{minute - 120_000}-0".encode(),
                {b"samples": b"3", b"running": b"2", b"finished": b"6", b"ttft_p95_ms": b"9"},
            ),
            (f"{minute - 60_000}-0".encode(), {b"samples": b"1", b"running": b"7"}),
        ]


def test_a_time_of_the_future_does_not_stop_the_reaping(own_worker: HandWorker) -> None:
    """Else nothing would be reaped up to that time."""
    server, year = own_worker.redis, 365 * 86_400_000
    now = server.time()[0] * 1000
    server.hset(KEYS.upkeep, mapping={"seen": now, "since": now + year})
    upkeep.reap(read_settings_of(JobsSettings))
    assert int(server.hget(KEYS.upkeep, "since")) < now + 60_000


@pytest.mark.parametrize("kind", ["value", *TYPES])
def test_spoilt_records_keep_no_upkeep_from_its_work(own_worker: HandWorker, kind: str) -> None:
    """Whatever the jobs' own keys hold, what is late ends, and minutes are written again."""
    server = own_worker.redis
    minute = (server.time()[0] - 120) // 60 * 60_000
    for value in SPOILT.values() if kind == "value" else [b""]:
        server.flushall()
        request_id = put(own_worker.queue, deadline_ms=1)
        if kind == "value":
            server.hset(KEYS.upkeep, mapping={"seen": value, "since": value})
            server.xadd(KEYS.statistics, {"waiting": 5}, id=f"{minute}-0")
            server.xadd(KEYS.statistics, {"waiting": value, value: value}, id=f"{minute}-1")
            server.xadd(KEYS.statistics_minutes, {"waiting": value}, id=f"{2**63}-0")
        else:
            for key in (KEYS.upkeep, KEYS.statistics, KEYS.statistics_minutes):
                make_of_type(server, key, kind)
        upkeep.reap(read_settings_of(JobsSettings))
        server.hset(KEYS.upkeep, mapping={"seen": server.time()[0] * 1000, "since": 1})
        assert upkeep.reap(read_settings_of(JobsSettings)).startswith("0 returned, 1 ended")
        assert own_worker.queue.state(request_id) is RequestState.EXPIRED
        upkeep.roll_up(read_settings_of(JobsSettings))
        if kind == "value":
            [(_, fields)] = server.xrange(KEYS.statistics_minutes)
            assert math.isfinite(float(fields[b"waiting"]))
