"""Webhooks: which ends send one, and what becomes of it."""

from __future__ import annotations

import json
import re
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

from promptq.producer.calls.safe_http import tls_context
from promptq.producer.jobs.earlier_webhooks import take_over
from promptq.producer.jobs.rq_jobs import open_jobs_redis
from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.deliveries import DeadWebhook, Deliveries, Waiting, read_dead
from promptq.producer.webhooks.webhook_attempts import BACKOFF_SECONDS
from promptq.producer.webhooks.webhook_signature import (
    OVERLAP_SECONDS,
    WebhookSecrets,
    master_file,
    shared_file,
)
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.queue.request_queue import RequestQueue
from promptq.shared.settings.common import read_settings_of
from tests.producer.playing import KEYS, HandWorker, Run
from tests.producer.webhooks.receiving import (
    MASTER,
    Receiver,
    ask,
    ask_and_answer,
    is_signed,
    receiver,
)
from tests.support.roles import as_role
from tests.support.servers import Server, make_certificates
from tests.support.spoilt import SPOILT, TYPES, make_of_type


@pytest.fixture
def settings(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobsSettings:
    """Of jobs too, which read the environment."""
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(tmp_path))
    monkeypatch.setenv("PROMPTQ_WEBHOOK_MASTER_SECRET", MASTER)
    monkeypatch.setenv("PROMPTQ_WEBHOOK_ALLOW_PRIVATE", "1")
    monkeypatch.setenv("PROMPTQ_WEBHOOK_TIMEOUT_SECONDS", "0.2")
    return read_settings_of(JobsSettings)


class Jobs:
    """Does the webhook work of the leader of `promptq jobs`, one step at a time."""

    def __init__(self, settings: JobsSettings) -> None:
        self.settings = settings
        self.redis: Any = open_jobs_redis(settings)
        self.now = time.time()
        self.lead()

    def lead(self) -> None:
        self.deliveries = Deliveries(self.redis, self.settings, clock=lambda: self.now)

    def work(self) -> None:
        """Call every webhook that is due, once."""
        self.deliveries.go_on()
        while self.deliveries.wait(0.01):
            self.deliveries.go_on()

    def waiting(self) -> dict[str, Waiting]:
        found = self.redis.hgetall(KEYS.webhooks_waiting).items()
        return {key.decode(): Waiting.model_validate_json(value) for key, value in found}

    def pass_time(self) -> None:
        """Whatever waits for its next attempt is due, and another process leads."""
        self.now = max([self.now, *(it.due for it in self.waiting().values())])
        self.close()
        self.lead()

    def dead(self) -> list[DeadWebhook]:
        return read_dead(self.redis, KEYS)

    def close(self) -> None:
        self.deliveries.close(10)


@pytest.fixture
def jobs(settings: JobsSettings) -> Iterator[Jobs]:
    jobs = Jobs(settings)
    with closing(jobs.redis), closing(jobs):
        yield jobs


def test_every_final_state_is_reported(server: Server) -> None:
    """Exactly those requests that asked for it are listed, whoever ended them and how; and their
    results are kept for longer than a day."""
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
            assert client.pttl(KEYS.request(request_id)) > 25 * 3_600_000
        assert client.pttl(KEYS.request("nobody")) <= 3_600_000


def test_a_webhook_is_signed_and_has_the_result(
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
    ask_and_answer(own_worker, "r", receiving.url("/status/500"))
    jobs.work()
    assert jobs.waiting()["r"].due - jobs.now == BACKOFF_SECONDS[0]
    jobs.work()
    assert len(receiving.calls) == 1, "not before it is due"
    jobs.pass_time()
    jobs.work()
    first, second = receiving.headers_at("/status/500")
    assert first["webhook-id"] == second["webhook-id"]
    assert all(is_signed(headers, body) for _, headers, body in receiving.calls)
    assert jobs.dead() == []


def test_after_a_day_it_is_dead(jobs: Jobs, own_worker: HandWorker, receiving: Receiver) -> None:
    assert 0.9 * 86_400 < sum(BACKOFF_SECONDS) < 86_400
    ask_and_answer(own_worker, "r", receiving.url("/status/503"))
    jobs.work()
    for attempt, seconds in enumerate(BACKOFF_SECONDS, 1):
        assert len(receiving.calls) == attempt
        assert jobs.waiting()["r"].due - jobs.now == seconds
        jobs.pass_time()
        jobs.work()
    assert jobs.waiting() == {}
    [dead] = jobs.dead()
    assert (dead.request_id, dead.tenant, dead.attempts) == ("r", "", 11)
    assert dead.reason.endswith("answered 503")
    jobs.pass_time()
    jobs.work()
    assert len(receiving.calls) == len(BACKOFF_SECONDS) + 1


def test_receivers_that_misbehave(jobs: Jobs, own_worker: HandWorker, receiving: Receiver) -> None:
    """One that never answers, one that is not there, one that redirects, one that wants no more."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        for path in ("/never", "/status/302", "/status/410"):
            ask_and_answer(own_worker, path[1:], receiving.url(path))
        ask_and_answer(own_worker, "nobody", nobody)
        jobs.work()
    called = sorted(at for at, _, _ in receiving.calls)
    assert called == ["/never", "/status/302", "/status/410"]
    jobs.pass_time()
    jobs.work()
    again = sorted(at for at, _, _ in receiving.calls[3:])
    assert again == ["/never", "/status/302"], "gone is gone; a redirect is followed nowhere"
    [dead] = jobs.dead()
    assert (dead.request_id, dead.attempts) == ("status/410", 1)
    assert dead.reason.endswith("answered 410: the receiver wants no more webhooks")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_webhook_over_tls(
    jobs: Jobs,
    own_worker: HandWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """To a receiver whose certificate holds, and to no other; nobody reads a huge answer."""
    make_certificates(tmp_path)
    tls_context.cache_clear()
    request.addfinalizer(tls_context.cache_clear)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with receiver(tls) as receiving:
        ask_and_answer(own_worker, "r", receiving.url("/huge"))
        jobs.work()
        assert receiving.calls == [], "nobody vouches for it"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
        tls_context.cache_clear()
        jobs.pass_time()
        jobs.work()
        [(_, headers, body)] = receiving.calls
        assert is_signed(headers, body)
        assert headers["host"] == f"127.0.0.1:{receiving.port}"
        receiving.hung_up.wait()
        assert jobs.waiting() == {}, "it was taken"


def test_private_addresses_are_refused(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    """Unless a setting allows them; and nothing is tried again."""
    jobs.settings.webhook_allow_private = False
    ask_and_answer(own_worker, "r", receiving.url("/ok"))
    jobs.work()
    jobs.pass_time()
    jobs.work()
    assert receiving.calls == []
    assert jobs.waiting() == {}
    [dead] = jobs.dead()
    allowing = "127.0.0.1 is in a private network; PROMPTQ_WEBHOOK_ALLOW_PRIVATE=1 allows it"
    assert (dead.request_id, dead.reason) == ("r", allowing)


def test_a_record_that_is_gone(jobs: Jobs, own_worker: HandWorker, receiving: Receiver) -> None:
    """However it went: who waits for the webhook finds it among the dead."""
    ask_and_answer(own_worker, "r", receiving.url("/status/500"))
    jobs.work()
    own_worker.redis.delete(KEYS.request("r"))
    jobs.pass_time()
    jobs.work()
    [dead] = jobs.dead()
    assert (dead.request_id, dead.attempts) == ("r", 2)
    assert dead.reason == "the request's record has expired"


def test_the_leader_goes_on_beside_what_ends(jobs: Jobs, own_worker: HandWorker) -> None:
    """A tick takes in so much and no more, however much there is."""
    server = own_worker.redis
    server.zadd(KEYS.webhooks, {f"r{number}": number for number in range(3000)})
    jobs.deliveries.go_on()
    assert server.zcard(KEYS.webhooks) == 1000


def test_strangers_keep_nobody_from_a_webhook(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    """Ids that are no ended requests leave the list; no name of a field stops a webhook."""
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
    assert jobs.waiting() == {}


@pytest.mark.parametrize("field", ["result", "finished_at", "payload", "state", "tenant"])
def test_a_spoilt_record_keeps_no_other_webhook(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver, field: str
) -> None:
    """And what is sent of one is JSON: it has no NaN."""
    server = own_worker.redis
    asking = {"payload": json.dumps({"prompt": "a", "webhook_url": receiving.url("/odd")})}
    for number, value in enumerate(SPOILT.values()):
        server.hset(KEYS.request(f"odd-{number}"), mapping={**asking, field: value})
        server.zadd(KEYS.webhooks, {f"odd-{number}": number})
    ask_and_answer(own_worker, "sound", receiving.url("/ok"))
    jobs.work()
    assert "/ok" in [at for at, _, _ in receiving.calls]
    for _, _, body in receiving.calls:
        json.loads(body, parse_constant=pytest.fail)
    assert jobs.waiting() == {}


@pytest.mark.parametrize("kind", TYPES)
def test_a_list_that_is_spoilt_while_it_is_worked_on_is_begun_anew(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver, kind: str
) -> None:
    """That of dead webhooks and that of those that wait: what comes later is called."""
    server = own_worker.redis
    ask_and_answer(own_worker, "dies", receiving.url("/gone"))
    jobs.deliveries.go_on()
    for key in (KEYS.webhooks_waiting, KEYS.webhooks_dead):
        make_of_type(server, key, kind)
    jobs.work()
    jobs.dead()
    ask_and_answer(own_worker, "later", receiving.url("/ok"))
    jobs.work()
    assert "/ok" in [at for at, _, _ in receiving.calls]
    assert server.type(KEYS.webhooks_waiting) in (b"none", b"hash")


def test_a_server_that_refuses_strikes_nothing_off(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    ask_and_answer(own_worker, "r", receiving.url("/ok"))
    own_worker.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            jobs.work()
    finally:
        own_worker.redis.config_set("maxmemory", 0)
    jobs.work()
    assert [at for at, _, _ in receiving.calls] == ["/ok"]


def test_what_strangers_wrote_of_what_waits(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    """Malformed entries leave the list, and a key of another type is deleted."""
    server = own_worker.redis
    spoilt: dict[Any, str] = {
        b"\xff": "{}",
        "a": "[" * 5000,
        "b": "1",
        "c": '{"due": NaN}',
        "d": '{"due": -1e999}',
    }
    for number, attempts in enumerate((-99, 11, 2**70)):
        ended = f"ended-{number}"
        asking = {"prompt": "a", "webhook_url": receiving.url("/status/500")}
        server.hset(KEYS.request(ended), "payload", json.dumps(asking))
        spoilt[ended] = json.dumps({"attempts": attempts, "due": 0})
    server.hset(KEYS.webhooks_waiting, mapping=spoilt)
    ask_and_answer(own_worker, "r", receiving.url("/status/500"))
    jobs.work()
    assert set(jobs.waiting()) == {"r"}
    server.delete(KEYS.webhooks_waiting)
    server.set(KEYS.webhooks_waiting, "a")
    server.zadd(KEYS.webhooks, {"r": 1})
    jobs.close()
    jobs.lead()
    jobs.work()
    assert len(receiving.calls) == 2


def test_what_a_tenant_may_pile_up(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver, run: Run
) -> None:
    """Webhooks beyond the limit are dead at once; another tenant's wait as before."""
    jobs.settings.webhook_max_waiting = 3
    for number in range(5):
        ask_and_answer(own_worker, f"a{number}", receiving.url("/status/500"), tenant="a")
    ask_and_answer(own_worker, "b", receiving.url("/ok"), tenant="b")
    jobs.work()
    assert set(jobs.waiting()) == {"a0", "a1", "a2"}
    listed = json.loads(run("webhooks", "dead", "--json").stdout)
    assert [it["request_id"] for it in listed] == ["a4", "a3"]
    table = " ".join(run("webhooks", "dead").stdout.split())
    assert re.search(r"a4 a 0 too many webhooks of its tenant wait .* a3 a 0 too many", table)
    assert {(it.request_id, it.tenant, it.attempts) for it in jobs.dead()} == {
        ("a3", "a", 0), ("a4", "a", 0),
    }  # fmt: skip
    assert len(receiving.headers_at("/ok")) == 1


def test_it_is_sent_again_by_hand(jobs: Jobs, own_worker: HandWorker, receiving: Receiver) -> None:
    """docs/jobs.md has the commands. They also send a dead webhook again; one that was taken off
    the list is not sent.
    """
    ask_and_answer(own_worker, "r", receiving.url("/ok"))
    jobs.work()
    own_worker.redis.zadd(KEYS.webhooks, {"r": 0})
    jobs.work()
    assert len(receiving.calls) == 2
    ask_and_answer(own_worker, "off", receiving.url("/status/500"))
    jobs.work()
    own_worker.redis.hdel(KEYS.webhooks_waiting, "off")
    jobs.now += 10**6
    jobs.work()
    assert len(receiving.calls) == 3


def test_what_an_earlier_release_handed_to_rq(
    jobs: Jobs, own_worker: HandWorker, receiving: Receiver
) -> None:
    """Such a webhook is called too, as its request says, whether it waited for its first attempt or
    the next. Other jobs there are deleted."""
    import zlib

    server = own_worker.redis
    for request_id in ("first", "next"):
        ask_and_answer(own_worker, request_id, receiving.url(f"/{request_id}"))
    server.delete(KEYS.webhooks)
    first, later, unknown, bomb, text, large = (f"msg_{digit * 32}" for digit in "012345")
    for name, request_id in {first: "first", later: "next", unknown: "unknown"}.items():
        body = json.dumps({"data": {"request_id": request_id}})
        args = ["default", name, "http://127.0.0.1:1/elsewhere", body]
        data = zlib.compress(json.dumps(["any.name", None, args, {}]).encode())
        server.hset(f"rq:job:{name}", "data", data)
    server.hset(f"rq:job:{bomb}", "data", zlib.compress(bytes(10**8)))
    server.set(f"rq:job:{text}", "x")
    server.hset(f"rq:job:{large}", "data", data + bytes(2**24))
    listed = "rq:queue:promptq-default-webhooks"
    server.rpush(listed, text, large, unknown, bomb, b"\xff", "other", first)
    server.zadd("rq:scheduled:promptq-default-webhooks", {later: 2**40})
    assert take_over(jobs.redis, jobs.redis, KEYS) == 2
    jobs.work()
    assert sorted(at for at, _, _ in receiving.calls) == ["/first", "/next"]
    assert server.keys("rq:*") == []
    server.set(listed, "x")
    assert take_over(jobs.redis, jobs.redis, KEYS) == 0
    assert server.keys("rq:*") == []


def test_the_secrets(settings: JobsSettings) -> None:
    """Each tenant has its own, made of one that is made once, for its owner's eyes alone."""
    own = settings.model_copy(update={"webhook_master_secret": None})
    master = lambda: master_file(own).read_text().strip()  # noqa: E731
    found = {tenant: WebhookSecrets(own).of(tenant) for tenant in ("", "a", "b")}
    assert master_file(own).stat().st_mode & 0o777 == 0o600
    assert len({master(), *(secret for [secret] in found.values())}) == 4
    assert found == {tenant: WebhookSecrets(own).of(tenant) for tenant in found}
    other = own.model_copy(update={"queue": "other"})
    assert WebhookSecrets(other).of("a") != found["a"]
    master_file(own).write_text("whsec_dG9vIHNob3J0")
    with pytest.raises(ConfigurationError, match=r"webhook_master_secret.*24 to 64 bytes"):
        WebhookSecrets(own)


def test_a_rotation(
    jobs: Jobs,
    settings: JobsSettings,
    own_worker: HandWorker,
    receiving: Receiver,
    run: Run,
    tmp_path: Path,
) -> None:
    """For a day the old secret verifies too; other tenants have theirs as before."""
    env = {"PROMPTQ_FILES_DIR": str(tmp_path), "PROMPTQ_WEBHOOK_MASTER_SECRET": MASTER}
    [old] = run("webhooks", "secret", "--tenant", "a", **env).stdout.split()
    other = WebhookSecrets(settings).of("b")
    [new] = run("webhooks", "rotate", "--tenant", "a", **env).stdout.split()
    assert run("webhooks", "secret", "--tenant", "a", **env).stdout.split() == [new, old]
    ask_and_answer(own_worker, "r", receiving.url("/ok"), tenant="a")
    jobs.work()
    [(_, headers, body)] = receiving.calls
    assert is_signed(headers, body, new)
    assert is_signed(headers, body, old)
    tomorrow = WebhookSecrets(settings, clock=lambda: time.time() + OVERLAP_SECONDS)
    assert tomorrow.of("a") == [new]
    assert tomorrow.of("b") == other
    third = WebhookSecrets(settings).rotate("a")
    assert WebhookSecrets(settings).of("a") == [third, new]
    rotations = tmp_path / "webhook-rotations.json"
    assert rotations.stat().st_mode & 0o777 == 0o600
    rotations.write_text("[]")
    refused = run("webhooks", "secret", **env)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is not a list of rotations" in refused.stderr
    assert run("webhooks", "secret", "--tenant", "a b", **env).returncode == 1


def test_the_secret_of_earlier_releases(
    settings: JobsSettings, own_worker: HandWorker, receiving: Receiver
) -> None:
    """While the old secret exists, jobs also sign with it; no tenant's secret is made of it."""
    earlier = "whsec_" + "b" * 40
    shared_file(settings).write_text(earlier + "\n")
    assert WebhookSecrets(settings).has_shared
    jobs = Jobs(settings)
    with closing(jobs.redis), closing(jobs):
        ask_and_answer(own_worker, "r", receiving.url("/ok"))
        jobs.work()
    [(_, headers, body)] = receiving.calls
    assert is_signed(headers, body, earlier)
    assert is_signed(headers, body)
    assert earlier not in WebhookSecrets(settings).of("")
