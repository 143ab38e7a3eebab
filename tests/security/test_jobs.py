"""Attacks on the jobs: by who can write to RQ's server, and by one tenant on another."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import standardwebhooks.webhooks as standard

from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, BatchRecord, new_batch
from promptq.producer.batch_store.files import FileStore
from promptq.producer.batch_store.input_file import new_batch_id
from promptq.producer.batches.batch_job import LEASE_MS, RunnerLease
from promptq.producer.jobs.batch_dispatcher import Dispatcher
from promptq.producer.jobs.rq_jobs import batch_queue
from promptq.producer.settings.jobs import JobsSettings
from promptq.producer.webhooks.tenant_turns import Turns
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.producer.batches.conftest import finished_batch, line, write_lines
from tests.producer.playing import KEYS, HandWorker, Start
from tests.producer.webhooks.receiving import MASTER, Receiver, ask_and_answer, receiver, secret_of
from tests.support.model_free import running_worker
from tests.support.processes import family_of, until_ready
from tests.support.roles import as_role, forget_refusals, refusals
from tests.support.waiting import async_until

WORKING = ["promptq-default-upkeep", "promptq-default-batches"]
QUEUES = [*WORKING, "promptq-default-webhooks"]
UPKEEP = "promptq.producer.jobs.upkeep"
REAP = f"{UPKEEP}.reap"
BLANK = bytes(random.Random(1).choices(b" \t\n", k=40_000))
"""Blanks that are longer than any call even when packed."""
RUN = "promptq.producer.batches.batch_job.run_batch_job"


class Forger:
    """Writes to RQ's server whatever he likes."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._num_forged = 0
        self.refused: list[str] = []
        """Ids of forged jobs in our workers' queues that are no jobs of ours."""

    def push(self, queue: str, data: bytes, is_ours: bool = False, **fields: Any) -> None:
        """Twice: by an id that jobs of ours have, and by one that none has."""
        self._num_forged += 1
        sound = {"origin": queue, "status": "queued", "created_at": "2026-01-01T00:00:00.000000Z"}
        record = {name: value for name, value in {**sound, **fields}.items() if value is not None}
        for prefix in ("promptq-", ""):
            job_id = f"{prefix}forged-{self._num_forged}"
            self._server.hset(f"rq:job:{job_id}", mapping={**record, "data": data})
            self._server.rpush(f"rq:queue:{queue}", job_id)
            if queue in WORKING and not (is_ours and prefix):
                self.refused.append(job_id)

    def call(self, queue: str, *data: Any, is_ours: bool = False, **fields: Any) -> None:
        self.push(queue, zlib.compress(json.dumps(data).encode()), is_ours, **fields)


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return (os.system, (self.command,))


def forge_everything(forger: Forger, command: str, url: str) -> None:
    """Every way to run something that RQ has, in each of our queues."""
    call = ["os.system", None, [command], {}]
    module = "tests.security.imported.never"
    webhooks = json.dumps(
        [{"url": url, "job_status": it, "method": "POST"} for it in ("finished", "failed")]
    )
    for queue in QUEUES:
        for forged in (
            call,
            ["os.system", {"a": 1}, [command], {}],
            ["system", "os", [command], {}],
            ["subprocess.run", None, [["sh", "-c", command]], {"shell": False}],
            [f"{UPKEEP}.redis.Redis", None, ["default"], {}],
            [f"{UPKEEP}.reap.__globals__", None, ["default"], {}],
            [f" {REAP}", None, ["default"], {}],
            ["", None, ["default"], {}],
            [None, None, ["default"], {}],
            [[REAP], None, ["default"], {}],
            [{}, None, ["default"], {}],
            [REAP],
            [REAP, None, ["default"], {}, None],
            [REAP, "os", ["default"], {}],
            [REAP, False, ["default"], {}],
            [REAP, None, ["other"], {}],
            [REAP, None, [["default"]], {}],
            [REAP, None, [None], {}],
            [REAP, None, [1], {}],
            [REAP, None, [], {"queue": "default"}],
            [REAP, None, ["default"], {"settings": {}}],
            [REAP, None, ["default"], []],
            [REAP, None, ["default"], None],
            [REAP, None, "default", {}],
            [REAP, None, {"default": 1}, {}],
            [REAP, None, ["default", "default"], {}],
            [RUN, None, ["default"], {}],
            [RUN, None, ["default", command], {}],
            [RUN, None, ["default", new_batch_id(), "more"], {}],
            [RUN, None, ["default", f"{new_batch_id()}\n"], {}],
            [RUN, None, ["default", f"{new_batch_id()}/../.."], {}],
            [RUN, None, ["../..", new_batch_id()], {}],
            [RUN, None, ["other", new_batch_id()], {}],
            ["os.system", None, ["default"], {}],
            ["os.system", None, ["default", new_batch_id()], {}],
            [RUN, None, ["default\x00", new_batch_id()], {}],
        ):
            forger.call(queue, *forged)
        if not queue.endswith("upkeep"):
            forger.call(queue, REAP, None, ["default"], {})
        if not queue.endswith("batches"):
            forger.call(queue, RUN, None, ["default", new_batch_id()], {})
        for text in ("null", "1", '"abcd"', '{"a": 1}', "9" * 4000, "NaN", "[" * 4000, ""):
            forger.push(queue, zlib.compress(text.encode()))
        forger.push(queue, json.dumps(call).encode())
        forger.push(queue, zlib.compress(pickle.dumps(Bomb(command))))
        forger.push(queue, pickle.dumps(Bomb(command)))
        forger.push(queue, zlib.compress(bytes(2**30 // 8), 9))  # it would be 128 MiB
        forger.push(queue, zlib.compress(b"[" * 4_000_000, 9))  # of an allowed size when packed
        forger.push(queue, zlib.compress(json.dumps([REAP, None, ["default"], {}]).encode())[:-1])
        forger.push(
            queue, zlib.compress(json.dumps([REAP, None, ["default"], {}]).encode() + BLANK)
        )
        forger.push(queue, b"x" * 100_000)
        forger.push(queue, b"\xff")
        forger.push(queue, b"")
        is_ours = queue.endswith("upkeep")
        sound = [REAP, None, ["default"], {}] if is_ours else call
        for fields in (
            *({f"{name}_callback_name": module} for name in ("success", "failure", "stopped")),
            {"webhooks": webhooks},
            {"serializer": "pickle", "meta": pickle.dumps(Bomb(command))},
            {"result": pickle.dumps(Bomb(command)), "exc_info": zlib.compress(bytes(10**6))},
            {"timeout": "never", "result_ttl": "x", "enqueued_at": "noon", "created_at": "\x00"},
            {"dependency_ids": "[[", "retry_intervals": "{", "repeats_left": "-"},
            {"rate_limit_key": "a", "rate_limit_concurrency": "1", "group_id": "g"},
            {"retries_left": "9", "retry_intervals": "[0]", "repeats_left": "9"},
            {"worker_name": b"\xff", "description": b"\xff", "ttl": "-1", "\xff": "a"},
            {"result": "x" * 5_000_000},
        ):
            forger.call(queue, *sound, is_ours=is_ours, **fields)
            forger.call(queue, *call, **fields)
        for fields in (
            {"status": "flying"},
            {"status": b"\xff"},
            {"origin": "promptq-other-upkeep"},
            {"origin": b"\xff"},
            {"origin": None},
        ):
            forger.call(queue, *call, **fields)


def spoil_lists(server: Any) -> None:
    """Spoil RQ's lists beside the jobs, for each of our queues and for all."""
    for queue in QUEUES:
        for end in ("", ":intermediate"):
            server.rpush(f"rq:queue:{queue}{end}", b"\xff\xfe", "a b", "no-such-job", "x" * 100_000)
            server.rpush(f"rq:queue:{queue}{end}", "", "promptq-a:b", "promptq-\n", "promptq-../a")
            server.rpush(f"rq:queue:{queue}{end}", "promptq-no-such-job", "promptq-no-hash")
        server.zadd(
            f"rq:wip:{queue}", {b"\xff": 1, "a:b:c": 1, "no:one": 1, "promptq-no-hash:a": 1}
        )
        server.sadd(f"rq:workers:{queue}", "rq:worker:other", "session:1", b"\xff")
        server.zadd(f"rq:ready:{queue}", {"promptq-forged-1": 1, b"\xff": 1})
        server.zadd(f"rq:deferred:{queue}", {"promptq-forged-1": 1, b"\xff": 1})
        server.zadd(f"rq:failed:{queue}", {b"\xff": 1})
        server.zadd(f"rq:finished:{queue}", {b"\xff": 1})
    server.set("rq:job:promptq-no-hash", "a")
    dependents = ["promptq-forged-1", "forged-1", "promptq-no-hash", b"\xff"]
    server.sadd("rq:job:promptq-default-upkeep-reap:dependents", *dependents[:2])
    server.sadd("rq:job:promptq-default-upkeep-roll_up:dependents", *dependents[2:])
    server.sadd("rq:groups", "g", b"\xff")
    server.sadd("rq:rl-keys", "a", b"\xff")


async def test_rq_runs_our_functions_only(
    redis_url: str, tmp_path: Path, start: Start, own_worker: HandWorker
) -> None:
    """Strangers' jobs on RQ's server are neither run nor imported, send nothing, and stop nobody: a
    batch, a webhook and the upkeep behind them are served.
    """
    server, ran, log = own_worker.redis, tmp_path / "ran", tmp_path / "log"
    forget_refusals(redis_url)
    with receiver() as receiving, log.open("w") as logged:
        forger = Forger(server)
        forge_everything(forger, f"touch {ran}", receiving.url("/forged"))
        spoil_lists(server)
        process = start(
            "jobs",
            PROMPTQ_FILES_DIR=str(tmp_path / "files"),
            PROMPTQ_WEBHOOK_ALLOW_PRIVATE="1",
            PROMPTQ_LOG_FORMAT="json",
        )
        reading = threading.Thread(target=lambda: logged.writelines(process.stderr or ()))
        reading.start()
        await until_ready(process)
        ask_and_answer(own_worker, "r", receiving.url("/ok"))
        batch = await batch_of(redis_url, tmp_path, "t", 3)
        async with running_worker(redis_url):
            assert (await finished_batch(redis_url, batch.id)).status == "completed"
        await async_until(lambda: not any(server.llen(f"rq:queue:{queue}") for queue in QUEUES))
        await async_until(lambda: bool(server.exists(KEYS.upkeep)))
        await async_until(lambda: [path for path, _, _ in receiving.calls] == ["/ok"])
        finished = "rq:finished:promptq-default-upkeep"
        for name in ("reap", "roll_up", "sweep"):
            job_id = f"promptq-default-upkeep-{name}"
            await async_until(lambda job_id=job_id: server.zscore(finished, job_id) is not None)
        # RQ's own channel, and all other ways in which it takes orders.
        assert server.pubsub_channels("rq:*") == []
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
        reading.join()
    assert not ran.exists()
    assert [path for path, _, _ in receiving.calls] == ["/ok"]
    text = log.read_text()
    assert "imported" not in text
    assert "Traceback" not in text
    assert "a process died" not in text
    # What is forged beside a sound function and arguments is not even seen; and what lies in the
    # queue of webhooks, which no worker has any longer, is deleted.
    refused = re.findall(r'"job_id": ?"(?:b\')?((?:promptq-)?forged-\d+)', text)
    assert sorted(refused) == sorted(forger.refused), "one line each"
    assert refusals(redis_url) == [], "what is none of ours is not even read"


async def test_a_forged_webhook_is_not_sent(
    tmp_path: Path, start: Start, own_worker: HandWorker
) -> None:
    """Whoever writes to RQ's server alone has nothing signed and sent anywhere."""
    server = own_worker.redis
    with receiver() as receiving:
        body = json.dumps({"data": {"request_id": "unknown"}})
        name = "promptq.producer.webhooks.webhook_attempts.deliver_webhook"
        for queue in QUEUES:
            Forger(server).call(
                queue, name, None, ["default", "msg_x", receiving.url("/forged"), body], {}
            )
        settings = {"PROMPTQ_FILES_DIR": str(tmp_path), "PROMPTQ_WEBHOOK_ALLOW_PRIVATE": "1"}
        process = start("jobs", **settings)
        await until_ready(process)
        await async_until(lambda: not any(server.llen(f"rq:queue:{queue}") for queue in QUEUES))
        ask_and_answer(own_worker, "r", receiving.url("/ok"))
        await async_until(lambda: bool(receiving.calls))
        assert [path for path, _, _ in receiving.calls] == ["/ok"]


async def batch_of(url: str, folder: Path, tenant: str, num_lines: int, **key: Any) -> BatchRecord:
    """A batch of a tenant, as the gateway makes it."""
    caller = ApiKey(name=f"{tenant}-key", tenant=tenant, **key)
    source = write_lines(folder / f"{tenant}.jsonl", [line(n) for n in range(num_lines)])
    with source.open("rb") as stream:
        stored = FileStore(folder / "files").add(
            stream, filename="in.jsonl", purpose="batch", tenant=tenant
        )
    batch = new_batch("/v1/completions", stored.id, caller)
    async with redis.asyncio.Redis.from_url(as_role("gateway", url)) as connection:
        await Batches(AsyncRequestQueue(connection)).add(batch)
    return batch


async def statuses(url: str, *batches: BatchRecord) -> list[str]:
    async with redis.asyncio.Redis.from_url(as_role("gateway", url)) as connection:
        records = Batches(AsyncRequestQueue(connection))
        return [(await records.get(it.id)).status for it in batches]


@pytest.mark.parametrize("how", ["waits for its rate", "is large"])
async def test_batches_take_turns_by_tenant(
    how: str, redis_url: str, tmp_path: Path, start: Start
) -> None:
    """A tenant's batches hold all processes; another's batch of one line ends before them."""
    rate = {"requests_per_minute": 1} if how == "waits for its rate" else {}
    process = start(
        "jobs", PROMPTQ_FILES_DIR=str(tmp_path / "files"), PROMPTQ_BATCH_TURN_SECONDS="0.5"
    )
    await until_ready(process)
    async with running_worker(redis_url):
        if how == "is large":
            with redis.Redis.from_url(as_role("", redis_url)) as server:
                server.hset(KEYS.config, "tenant_max_pending", 1)  # nobody's lines come fast
        first, second = [await batch_of(redis_url, tmp_path, "a", 4000, **rate) for _ in range(2)]
        while await statuses(redis_url, first, second) != ["in_progress"] * 2:
            await asyncio.sleep(0.02)
        other = await batch_of(redis_url, tmp_path, "b", 1)
        assert (await finished_batch(redis_url, other.id)).status == "completed"
        assert await statuses(redis_url, first, second) == ["in_progress"] * 2


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


async def test_webhooks_take_turns_by_tenant(
    redis_url: str, tmp_path: Path, start: Start, own_worker: HandWorker
) -> None:
    """One comes while all receivers of another tenant still hold theirs, with few places; and so
    does that tenant's own for another receiver. Neither can be taken for the other's."""
    with receiver() as slow, receiver() as quick:
        process = start(
            "jobs",
            is_new=True,
            PROMPTQ_FILES_DIR=str(tmp_path),
            PROMPTQ_WEBHOOK_ALLOW_PRIVATE="1",
            PROMPTQ_WEBHOOK_WORKERS="6",
            PROMPTQ_WEBHOOK_TIMEOUT_SECONDS="600",
            PROMPTQ_WEBHOOK_MASTER_SECRET=MASTER,
        )
        await until_ready(process)
        shown = "".join(map(environment_of, family_of(process.pid)))
        assert shown.count("PROMPTQ_FILES_DIR=") == 5, "of the command and its processes"
        assert MASTER not in shown
        assert as_role("jobs", redis_url) not in shown
        for number in range(8):
            ask_and_answer(own_worker, f"a{number}", slow.url("/never"), tenant="a")
        await async_until(lambda: len(slow.calls) == 2)
        ask_and_answer(own_worker, "a-other", quick.url("/a"), tenant="a")
        await async_until(lambda: bool(quick.headers_at("/a")))
        ask_and_answer(own_worker, "b", quick.url("/b"), tenant="b")
        await async_until(lambda: bool(quick.headers_at("/b")))
        assert not slow.over.is_set()
        assert len(slow.calls) == 2, "a slow receiver waits for itself"
        verify_each_by_its_own_secret_only(quick)
        process.kill()  # what it waits for would take ten minutes


def verify_each_by_its_own_secret_only(receiving: Receiver) -> None:
    verifying = {tenant: standard.Webhook(secret_of(tenant)) for tenant in ("a", "b")}
    for path, headers, body in receiving.calls:
        tenant = path[1:]
        told = verifying.pop(tenant).verify(body, headers)
        assert told["data"]["tenant"] == tenant
        [other] = {"a", "b"} - {tenant}
        with pytest.raises(standard.WebhookVerificationError):
            standard.Webhook(secret_of(other)).verify(body, headers)
        with pytest.raises(standard.WebhookVerificationError):
            standard.Webhook(MASTER).verify(body, headers)
    assert not verifying


def test_slow_receivers_of_many_tenants_leave_a_place() -> None:
    """Whatever they pile up: the next tenant begins at once, and so does another receiver."""
    turns = Turns(32)
    for tenant in range(30):
        for number in range(1000):
            turns.add(f"{tenant}-{number}", f"t{tenant}", f"slow-{number % 3}")
    held = list(iter(turns.take, None))
    by_tenant = {it.partition("-")[0] for it in held}
    assert by_tenant == {str(tenant) for tenant in range(30)}
    turns.add("new", "b", "quick")
    assert turns.take() == "new"
    for request_id in held:
        turns.give_back(request_id)
    alone = Turns(32)
    for number in range(1000):
        alone.add(f"{number}", "a", "slow")
    assert len(list(iter(alone.take, None))) == 11
    alone.add("quick", "a", "quick")
    assert alone.take() == "quick"


def test_receivers_of_a_tenant_take_turns() -> None:
    turns = Turns(4)
    for receiver_name in ("x", "y"):
        for number in range(3):
            turns.add(f"{receiver_name}{number}", "a", receiver_name)
    order = []
    while (taken := turns.take()) is not None:
        order.append(taken)
        turns.give_back(taken)
    assert order == ["x0", "y0", "x1", "y1", "x2", "y2"]


class Slow(redis.Redis):
    """Before each command but the first, what it had found in the server changes."""

    between: Any = None

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.between is not None:
            self.between()
        return super().execute_command(*args, **options)


class AsyncSlow(redis.asyncio.Redis):
    """The same."""

    between: Any = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.between is not None:
            self.between()
        return await super().execute_command(*args, **options)


def taken_over_between_two_commands(client: Any, server: Any, key: str) -> None:
    """The lease ends once one command was sent, and somebody else takes it."""
    sent: list[None] = []

    def between() -> None:
        if sent:
            server.set(key, "somebody-else", px=60_000)
        sent.append(None)

    client.between = between


async def test_a_batch_is_not_kept_or_let_go_of_that_somebody_else_took(redis_url: str) -> None:
    """Where it happens between looking and writing, too."""
    key = KEYS.batch_runner("b")
    with redis.Redis.from_url(as_role("operator", redis_url)) as server:
        for ttl_ms in (LEASE_MS, 0):
            async with AsyncSlow.from_url(as_role("jobs", redis_url)) as client:
                server.delete(key)
                lease = RunnerLease(AsyncRequestQueue(client), "b")
                assert await lease.hold()
                mine = server.get(key)
                taken_over_between_two_commands(client, server, key)
                if ttl_ms:
                    assert await lease.hold()
                    assert server.get(key) == mine
                else:
                    await lease.hold(0)
                    assert server.get(key) is None


def test_two_never_lead(redis_url: str) -> None:
    """Nor does one who steps down take the lead from the next."""
    key = KEYS.jobs_leader
    with (
        redis.Redis.from_url(as_role("operator", redis_url)) as server,
        Slow.from_url(as_role("jobs", redis_url)) as client,
    ):
        dispatcher = Dispatcher(client, batch_queue("default", client), JobsSettings())
        assert dispatcher.leads()
        mine = server.get(key)
        taken_over_between_two_commands(client, server, key)
        assert dispatcher.leads()
        assert server.get(key) == mine
        taken_over_between_two_commands(client, server, key)
        dispatcher.step_down()
        assert server.get(key) is None
