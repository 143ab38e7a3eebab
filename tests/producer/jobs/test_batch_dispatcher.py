"""The leader hands batches to RQ, a step at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from promptq.producer.batch_store.input_file import new_batch_id
from promptq.producer.jobs.batch_dispatcher import Dispatcher
from promptq.producer.jobs.leader import _do_each
from promptq.producer.jobs.rq_jobs import batch_queue, open_jobs_redis
from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.deliveries import Deliveries
from tests.producer.playing import KEYS, HandWorker
from tests.support.roles import as_role
from tests.support.servers import OwnServer

LEASE_SECONDS = 15.0  # of docs/jobs.md


class Leader:
    """A dispatcher whose time stands still until a test sets it."""

    def __init__(self, redis_url: str, server: redis.Redis) -> None:
        settings = JobsSettings(redis_url=as_role("jobs", redis_url))
        self.now = 0.0
        self.server = server
        self.redis = open_jobs_redis(settings)
        self._batches = batch_queue("default", self.redis)
        self.dispatcher = Dispatcher(self.redis, self._batches, settings, clock=lambda: self.now)
        self.deliveries = Deliveries(self.redis, settings)
        self.have_workers(3)

    def have_workers(self, count: int) -> None:
        """Pretend that this many of RQ's workers are alive."""
        key = "rq:workers:promptq-default-batches"
        self.server.delete(key)
        for number in range(count):
            self.server.sadd(key, f"rq:worker:promptq-{number:032x}")

    def make_batch(self, tenant: str) -> str:
        batch_id = new_batch_id()
        self.server.hset(KEYS.batch(batch_id), "tenant", json.dumps(tenant))
        self.server.sadd(KEYS.unfinished_batches, batch_id)
        return batch_id

    def hand_out(self) -> list[str]:
        """Batches that are handed to RQ's workers, which run them at once."""
        self.dispatcher.hand_out_batches()
        jobs = self._batches.get_job_ids()
        self.server.delete(self._batches.key)
        found = [job_id.removeprefix("promptq-") for job_id in jobs]
        for batch_id in found:
            self.server.set(KEYS.batch_runner(batch_id), "a")
        return found

    def give_way(self, batch_id: str) -> None:
        """Stop like a batch that is interrupted."""
        self.server.delete(KEYS.batch_runner(batch_id))
        self.server.hset(f"rq:job:promptq-{batch_id}", "status", "finished")

    def add_batch(self) -> str:
        """One that waits for a worker."""
        batch_id = new_batch_id()
        self.server.sadd(KEYS.unfinished_batches, batch_id)
        assert self.dispatcher.hand_out_batches() == 1
        assert self._batches.get_job_ids() == [f"promptq-{batch_id}"]
        return batch_id

    def take_off(self, batch_id: str, status: str | None) -> None:
        """Start like one of RQ's workers before it runs a batch."""
        job = f"rq:job:promptq-{batch_id}"
        self.server.delete(self._batches.key)
        if status is None:
            self.server.delete(job)
        else:
            self.server.hset(job, "status", status)
            self.server.hdel(job, "started_at")


@pytest.fixture
def leader(redis_url: str, own_worker: HandWorker) -> Iterator[Leader]:
    leader = Leader(redis_url, own_worker.redis)
    with closing(leader.redis):
        yield leader


@pytest.mark.parametrize("status", ["queued", "started"])
def test_a_batch_whose_worker_died_before_it_began_is_handed_out_again(
    leader: Leader, status: str
) -> None:
    """After the time of a lease, whatever RQ says of its job; each time it happens."""
    batch_id = leader.add_batch()
    for begin in (0.0, LEASE_SECONDS):
        leader.take_off(batch_id, status)
        for after in (0.0, LEASE_SECONDS - 0.1):
            leader.now = begin + after
            assert leader.dispatcher.hand_out_batches() == 0, "it may yet get a lease"
        leader.now = begin + LEASE_SECONDS
        assert leader.dispatcher.hand_out_batches() == 1
        assert leader.dispatcher.hand_out_batches() == 0, "it waits for a worker"
    leader.take_off(batch_id, status)
    assert leader.dispatcher.hand_out_batches() == 0
    leader.server.set(KEYS.batch_runner(batch_id), "a")
    leader.now = 10 * LEASE_SECONDS
    assert leader.dispatcher.hand_out_batches() == 0, "it is run"
    leader.server.delete(KEYS.batch_runner(batch_id))
    assert leader.dispatcher.hand_out_batches() == 0, "its time begins anew"


@pytest.mark.parametrize("status", ["failed", "finished", None])
def test_a_batch_that_rq_gave_up_is_handed_out_at_once(leader: Leader, status: str | None) -> None:
    leader.take_off(leader.add_batch(), status)
    assert leader.dispatcher.hand_out_batches() == 1


def test_tenants_take_turns(leader: Leader) -> None:
    """One after the other, however many batches one has; each tenant's eldest first."""
    leader.have_workers(2)
    a = [leader.make_batch("a") for _ in range(4)]
    assert leader.hand_out() == a[:2]
    b = [leader.make_batch("b") for _ in range(2)]
    c = leader.make_batch("c")
    assert leader.hand_out() == [], "no worker is free"
    leader.give_way(a[0])
    leader.give_way(a[1])
    assert leader.hand_out() == [b[0], c]
    leader.give_way(b[0])
    assert leader.hand_out() == [a[0]], "it was served longest ago"
    leader.give_way(c)
    assert leader.hand_out() == [b[0]]
    leader.have_workers(0)
    leader.give_way(b[0])
    assert leader.hand_out() == []


def test_what_strangers_wrote_of_a_batch_is_a_tenant_like_any(leader: Leader) -> None:
    ids = [leader.make_batch("a"), leader.make_batch("b")]
    leader.server.hset(KEYS.batch(ids[0]), "tenant", "[" * 10_000)
    leader.server.delete(KEYS.batch(ids[1]))
    leader.server.set(KEYS.batch(ids[1]), "a")
    assert leader.hand_out() == ids


def test_lists_that_strangers_spoilt_count_as_empty(
    leader: Leader, caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    """With one warning each; the rest of the jobs goes on."""
    spoilt = (KEYS.webhooks, KEYS.unfinished_batches)
    for key in spoilt:
        leader.server.set(key, "a")
    for _ in range(3):
        leader.deliveries.go_on()
        assert leader.dispatcher.hand_out_batches() == 0
    assert [message.split(": ")[0] for message in caplog.messages] == [*spoilt]
    leader.server.delete(*spoilt)
    leader.add_batch()


def test_a_job_that_a_stranger_spoilt_keeps_no_batch_from_its_turn(leader: Leader) -> None:
    spoilt, well = leader.make_batch("a"), leader.make_batch("b")
    leader.server.set(f"rq:job:promptq-{spoilt}", "x")
    assert well in leader.hand_out()


def test_a_step_that_fails_keeps_no_other_step_from_its_work(
    caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    """Whatever it raises; the log says so, and not each quarter of a second."""
    done: list[str] = []

    def fail() -> None:
        raise ValueError("a stranger's")

    for _ in range(100):
        assert not _do_each([fail, lambda: done.append("next")])
    assert done == ["next"] * 100
    assert caplog.messages == ["a step of the jobs failed: a stranger's"]


@pytest.mark.parametrize("role", ["replica", "primary without replicas"])
def test_a_server_that_refuses_writes_is_one_sentence_a_minute(
    role: str, tmp_path: Path, fresh_log: None
) -> None:
    """A server refuses writes after a failover; the log has no traceback."""
    with OwnServer(tmp_path) as server, server.client() as admin:
        if role == "replica":
            admin.replicaof("127.0.0.1", 1)
        else:
            admin.config_set("min-replicas-to-write", 1)
        dispatcher = Dispatcher(admin, batch_queue("default", admin), JobsSettings())
        with capture_logs() as logs:
            for _ in range(3):
                assert not _do_each([dispatcher.leads])
    [line] = logs
    assert line["event"] == "Redis does not accept a call, trying again"
    assert "exc_info" not in line


def test_long_entries_are_cut_in_the_log(leader: Leader) -> None:
    leader.server.zadd(KEYS.webhooks, {"a" * 10_000: 1})
    leader.server.sadd(KEYS.unfinished_batches, "a" * 10_000)
    with capture_logs() as logs:
        leader.deliveries.go_on()
        leader.dispatcher.hand_out_batches()
    assert [entry["event"] for entry in logs] == ["webhook entry removed", "batch entry removed"]
    assert {len(entry["entry"]) for entry in logs} == {100}
