"""Webhooks: which ends send one, and what becomes of it."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from promptq.producer.jobs.dispatching import Dispatcher
from promptq.producer.jobs.rq_queues import (
    JobScheduler,
    batch_queue,
    open_jobs_redis,
    run_worker,
    webhook_queue,
)
from promptq.producer.settings import JobsSettings, read_jobs_settings
from promptq.producer.webhooks.webhook_signature import load_secret, secret_file
from promptq.producer.webhooks.webhooks import BACKOFF_SECONDS
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.queue.request_queue import RequestQueue
from tests.certificates import make_certificates
from tests.producer.jobs.receiving import SECRET, Receiver, is_signed, receiver
from tests.producer.playing import HandWorker
from tests.roles import as_role
from tests.servers import Server

KEYS = Keys("default")


@pytest.fixture
def receiving() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def settings(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobsSettings:
    """Of jobs too, which read the environment."""
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(tmp_path))
    monkeypatch.setenv("PROMPTQ_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("PROMPTQ_WEBHOOK_ALLOW_PRIVATE", "1")
    monkeypatch.setenv("PROMPTQ_WEBHOOK_TIMEOUT_SECONDS", "0.2")
    return read_jobs_settings()


class Jobs:
    """What `promptq jobs` does, a step at a time, with RQ's own worker."""

    def __init__(self, settings: JobsSettings) -> None:
        self.redis = open_jobs_redis(settings)
        self.queue = webhook_queue("default", self.redis)
        batches = batch_queue("default", self.redis)
        self._dispatcher = Dispatcher(self.redis, self.queue, batches, settings)

    def work(self) -> None:
        """Call every webhook that is due, once."""
        self._dispatcher.hand_out_webhooks()
        run_worker(self.queue, burst=True)

    def pass_time(self) -> None:
        """Whatever waits for its next attempt is due."""
        for job_id in self.redis.zrange(self.queue.scheduled_job_registry.key, 0, -1):
            self.redis.zadd(self.queue.scheduled_job_registry.key, {job_id: 1})
        scheduler = JobScheduler(self.queue)
        scheduler.run_once()
        scheduler.stop()

    def failed(self) -> list[Job]:
        registry = FailedJobRegistry(queue=self.queue, serializer=JSONSerializer)
        ids = registry.get_job_ids(cleanup=False)
        return [Job.fetch(it, connection=self.redis, serializer=JSONSerializer) for it in ids]


@pytest.fixture
def jobs(settings: JobsSettings) -> Iterator[Jobs]:
    jobs = Jobs(settings)
    with closing(jobs.redis):
        yield jobs


def ask(queue: RequestQueue, request_id: str, url: str, **fields: Any) -> None:
    request = Request.build({"prompt": "a", "webhook_url": url, "max_tokens": 5, **fields})
    queue.enqueue([NewRequest(request_id, request)])


def test_every_final_state_is_told(server: Server) -> None:
    """Exactly those requests that asked for it are listed, whoever ended them and how; and their
    results are kept for a day."""
    with closing(server.connect()) as client:
        hand, url = HandWorker(client), "http://example.com/"
        ask(hand.queue, "completed", url)
        hand.finish(hand.take(), "hi")
        ask(hand.queue, "failed", url)
        hand.send(hand.take(), "h", FinishReason.ERROR)
        ask(hand.queue, "cancelled-waiting", url)
        hand.queue.cancel("cancelled-waiting")
        ask(hand.queue, "cancelled-running", url)
        claim = hand.take()
        hand.queue.cancel("cancelled-running")
        hand.send(claim, "x")
        ask(hand.queue, "expired", url, deadline_ms=1)
        time.sleep(0.005)
        hand.queue.reap()
        ask(hand.queue, "dead", url)
        hand.queue = RequestQueue(client, worker_id="by-hand", max_crashes=1)
        hand.take()
        client.zadd(KEYS.leases, {"dead": 1})
        hand.queue.reap()
        hand.take()
        client.zadd(KEYS.leases, {"dead": 1})
        hand.queue.reap()
        client.hset(KEYS.request("plain"), "payload", '{"prompt":"a", "webhook_url" : "http://b"}')
        client.zadd(KEYS.pending, {"plain": 1})
        hand.finish(hand.take(), "hi")
        hand.queue.enqueue([NewRequest("nobody", Request.build({"prompt": "a"}))])
        hand.finish(hand.take(), "hi")
        told = {raw.decode() for raw in client.zrange(KEYS.webhooks, 0, -1)}
        assert told == {
            "completed", "failed", "cancelled-waiting", "cancelled-running", "expired", "dead",
            "plain",
        }  # fmt: skip
        for request_id in told - {"dead"}:
            assert client.pttl(KEYS.request(request_id)) > 23 * 3_600_000
        assert client.pttl(KEYS.request("nobody")) <= 3_600_000


def test_a_webhook_is_signed_and_tells_the_result(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    ask(own_worker.queue, "a/b", receiving.url("/ok"), metadata={"my": "id"})
    own_worker.finish(own_worker.take(), "hi there")
    jobs.work()
    [(_, headers, body)] = receiving.calls
    assert is_signed(headers, body)
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    told = json.loads(body)
    assert told["type"] == "request.completed"
    assert told["data"]["request_id"] == "a/b"
    assert told["data"]["metadata"] == {"my": "id"}
    assert told["data"]["result"]["text"] == "hi there"
    jobs.work()
    assert len(receiving.calls) == 1, "once it was taken, it is not sent again"


def test_it_is_sent_again_until_it_is_taken(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    """Under the same id, newly signed, the first time after 5 s."""
    ask(own_worker.queue, "r", receiving.url("/status/500"))
    own_worker.finish(own_worker.take(), "hi")
    jobs.work()
    [due] = jobs.redis.zrange(jobs.queue.scheduled_job_registry.key, 0, -1, withscores=True)
    assert 0 < due[1] - time.time() <= BACKOFF_SECONDS[0]
    jobs.work()
    assert len(receiving.calls) == 1, "not before it is due"
    jobs.pass_time()
    jobs.work()
    first, second = receiving.headers_at("/status/500")
    assert first["webhook-id"] == second["webhook-id"]
    assert all(is_signed(headers, body) for _, headers, body in receiving.calls)
    assert jobs.failed() == []


def test_after_a_day_it_is_dead(jobs: Jobs, own_worker: HandWorker, receiving: Receiver) -> None:
    assert 0.9 * 86_400 < sum(BACKOFF_SECONDS) < 86_400
    ask(own_worker.queue, "r", receiving.url("/status/503"))
    own_worker.finish(own_worker.take(), "hi")
    jobs.work()
    [waiting] = jobs.redis.zrange(jobs.queue.scheduled_job_registry.key, 0, -1)
    job = Job.fetch(waiting.decode(), connection=jobs.redis, serializer=JSONSerializer)
    assert job.retries_left == len(BACKOFF_SECONDS) - 1
    jobs.redis.hset(job.key, "retries_left", 1)
    jobs.pass_time()
    jobs.work()
    jobs.pass_time()
    jobs.work()
    assert len(receiving.calls) == 3
    [dead] = jobs.failed()
    assert "answered 503" in str(dead.latest_result().exc_string)
    jobs.pass_time()
    jobs.work()
    assert len(receiving.calls) == 3


def test_receivers_that_misbehave(jobs: Jobs, own_worker: HandWorker, receiving: Receiver) -> None:
    """One that never answers, one that is not there, one that redirects, one that wants no more."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        for path in ("/never", "/status/302", "/status/410"):
            ask(own_worker.queue, path[1:], receiving.url(path))
            own_worker.finish(own_worker.take(), "hi")
        ask(own_worker.queue, "nobody", nobody)
        own_worker.finish(own_worker.take(), "hi")
        jobs.work()
    assert [at for at, _, _ in receiving.calls] == ["/never", "/status/302", "/status/410"]
    jobs.pass_time()
    jobs.work()
    again = sorted(at for at, _, _ in receiving.calls[3:])
    assert again == ["/never", "/status/302"], "gone is gone; a redirect is followed nowhere"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_webhook_over_tls(
    jobs: Jobs, own_worker: HandWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a receiver whose certificate holds, and to no other; nobody reads a huge answer."""
    make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with receiver(tls) as receiving:
        ask(own_worker.queue, "r", receiving.url("/huge"))
        own_worker.finish(own_worker.take(), "hi")
        jobs.work()
        assert receiving.calls == [], "nobody vouches for it"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
        jobs.pass_time()
        jobs.work()
        [(_, headers, body)] = receiving.calls
        assert is_signed(headers, body)
        assert headers["host"] == f"127.0.0.1:{receiving.port}"
        receiving.hung_up.wait()
        assert jobs.redis.zcard(jobs.queue.scheduled_job_registry.key) == 0, "it was taken"


def test_private_addresses_are_refused(
    jobs: Jobs,
    own_worker: HandWorker,
    receiving: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless a setting allows them; and nothing is tried again."""
    monkeypatch.setenv("PROMPTQ_WEBHOOK_ALLOW_PRIVATE", "0")
    ask(own_worker.queue, "r", receiving.url("/ok"))
    own_worker.finish(own_worker.take(), "hi")
    jobs.work()
    jobs.pass_time()
    jobs.work()
    assert receiving.calls == []
    [result] = [
        Job.fetch(it, connection=jobs.redis, serializer=JSONSerializer).return_value()
        for it in jobs.queue.finished_job_registry.get_job_ids()
    ]
    assert "private network" in result


def test_strangers_keep_nobody_from_a_webhook(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    """What is listed and is no request that ended is struck off; a field's name hinders nothing."""
    server = own_worker.redis
    asking = {"payload": json.dumps({"prompt": "a", "webhook_url": receiving.url("/no")})}
    for number, (entry, fields) in enumerate(
        {
            b"caf\xe9": asking,
            b"two words": asking,
            b"no-hash": None,
            b"no-time": asking | {"finished_at": "noon"},
            b"no-year": asking | {"finished_at": "9" * 30},
            b"no-result": asking | {"result": "["},
            b"no-text": asking | {"result": '"\\ud800"'},
            b"gone": {},
        }.items()
    ):
        key = KEYS.request("").encode() + entry
        if fields is None:
            server.set(key, "a")
        elif fields:
            server.hset(key, mapping=fields)
        server.zadd(KEYS.webhooks, {entry: number})
    ask(own_worker.queue, "sound", receiving.url("/ok"))
    server.hset(KEYS.request("sound"), b"caf\xe9", b"\xff")
    own_worker.finish(own_worker.take(), "hi")
    jobs.work()
    assert [at for at, _, _ in receiving.calls] == ["/ok"]
    assert server.zcard(KEYS.webhooks) == 0


def test_a_server_that_refuses_strikes_nothing_off(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    ask(own_worker.queue, "r", receiving.url("/ok"))
    own_worker.finish(own_worker.take(), "hi")
    own_worker.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            jobs.work()
    finally:
        own_worker.redis.config_set("maxmemory", 0)
    jobs.work()
    assert [at for at, _, _ in receiving.calls] == ["/ok"]


@pytest.mark.parametrize("name", ["producer.jobs.webhooks.deliver_webhook", "os.system"])
def test_what_is_no_job_of_this_version_is_refused(
    name: str, jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is a name imported that an earlier version gave, nor one that somebody put there."""
    job = jobs.queue.enqueue_call(name, args=(f"touch {tmp_path}/ran",))
    jobs.redis.hset(job.key, "failure_callback_name", "tests.producer.jobs.imported.never")
    jobs.work()
    (failed,) = jobs.failed()
    result = failed.latest_result()
    assert result is not None
    assert f"{name} is none of this version's jobs" in str(result.exc_string)
    assert "tests.producer.jobs.imported" not in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_the_secret(settings: JobsSettings, tmp_path: Path) -> None:
    """That of the settings; without one, it is made once, for its owner's eyes alone."""
    assert load_secret(settings) == b"a secret of thirty-two bytes ..."
    own = settings.model_copy(update={"webhook_secret": None})
    first = load_secret(own)
    assert len(first) == 32
    assert load_secret(own) == first
    assert secret_file(own).stat().st_mode & 0o777 == 0o600
    secret_file(own).write_text("whsec_dG9vIHNob3J0")
    with pytest.raises(ConfigurationError, match="24 to 64 bytes"):
        load_secret(own)


def test_nothing_is_pickled(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver, tmp_path: Path
) -> None:
    """A job that somebody pickled into our queue is not read, and ours are JSON."""
    import pickle
    import zlib

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    job_id = "bomb"
    jobs.redis.hset(
        f"rq:job:{job_id}",
        mapping={
            "data": zlib.compress(pickle.dumps(Bomb())),
            "origin": jobs.queue.name,
            "status": "queued",
            "created_at": "2026-01-01T00:00:00.000000Z",
        },
    )
    jobs.redis.rpush(jobs.queue.key, job_id)
    ask(own_worker.queue, "r", receiving.url("/ok"))
    own_worker.finish(own_worker.take(), "hi")
    jobs.work()
    jobs.work()
    assert not (tmp_path / "exploded").exists()
    assert len(receiving.calls) == 1
    kept = [key for key in jobs.redis.scan_iter("rq:job:*") if not key.endswith(job_id.encode())]
    assert kept
    for key in kept:
        json.loads(zlib.decompress(jobs.redis.hget(key, "data")))
