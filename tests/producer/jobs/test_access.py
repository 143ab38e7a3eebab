"""The jobs' role in deploy/redis.acl suffices, and allows no more than their part."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import redis
import redis.asyncio

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batch_store.files import FileStore
from promptq.shared.queue.request_queue import AsyncRequestQueue
from tests.producer.batches.conftest import line, write_lines
from tests.producer.playing import Run, Start
from tests.producer.webhooks.receiving import receiver
from tests.support.model_free import running_worker
from tests.support.paths import ROOT
from tests.support.roles import as_role, forget_refusals
from tests.support.servers import OwnServer
from tests.support.waiting import async_until

ACL = ROOT / "deploy" / "redis.acl"


async def test_the_role_of_the_jobs(tmp_path: Path, start: Start) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(5)])
    files = tmp_path / "files"
    with source.open("rb") as stream:
        stored = FileStore(files).add(stream, filename="in.jsonl", purpose="batch")
    admin = {"username": "admin", "password": "change-me-admin"}
    with (
        OwnServer(tmp_path / "server", "--aclfile", str(ACL), connect=admin) as server,
        server.client() as everything,
        receiver() as receiving,
    ):

        def url(role: str) -> str:
            return f"redis://{role}:change-me-{role}@127.0.0.1:{server.port}/0"

        settings = {"PROMPTQ_FILES_DIR": str(files), "PROMPTQ_WEBHOOK_ALLOW_PRIVATE": "1"}
        process = start("jobs", url=url("jobs"), **settings)
        batch = new_batch("/v1/completions", stored.id, ApiKey(name="k"))
        with Client(url("producer")) as client:
            client.enqueue("a", max_tokens=2, webhook_url=receiving.url("/status/500"))
        async with (
            redis.asyncio.Redis.from_url(url("gateway")) as producing,
            running_worker(url("worker")),
        ):
            batches = Batches(AsyncRequestQueue(producing))
            await batches.add(batch)
            while not (await batches.get(batch.id)).is_final:
                await asyncio.sleep(0.05)
            assert (await batches.get(batch.id)).status == "completed"
            assert [it.id for it in (await batches.page(("",), 9, None))[0]]
        await async_until(lambda: receiving.calls)
        await async_until(lambda: everything.exists("rq:finished:promptq-default-upkeep"))
        process.terminate()
        await asyncio.to_thread(process.wait)
        refused = {entry["object"] for entry in everything.acl_log()}
        assert not refused
        with (
            redis.Redis.from_url(url("jobs")) as jobs,
            pytest.raises(redis.exceptions.NoPermissionError),
        ):
            jobs.get("other")


@pytest.mark.parametrize("role", ["producer", "operator", "subscriber"])
def test_in_another_role(role: str, redis_url: str, run: Run, tmp_path: Path) -> None:
    """Each command says so in one line, and ends."""
    url = as_role(role, redis_url)
    refused = run("jobs", url=url, PROMPTQ_FILES_DIR=str(tmp_path / "files"))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.fullmatch(
        f"promptq: the user '{role}' may not do what `promptq jobs` does; give it the URL of the"
        r" user 'jobs' \(promptq acl\); the server at \S+ said: .*\n",
        refused.stderr,
    )
    listed = run("webhooks", "dead", url=url)
    if role == "operator":
        assert listed.stdout == "no webhooks were given up\n"
    else:
        assert (listed.returncode, listed.stdout) == (1, "")
        assert re.fullmatch(rf"promptq: the user '{role}' may not do this .*\n", listed.stderr)
    if role == "subscriber":
        source = write_lines(tmp_path / "in.jsonl", [line(0)])
        ended = run("batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"), url=url)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert re.fullmatch(rf"promptq: the user '{role}' may not do this .*\n", ended.stderr)
    forget_refusals(redis_url)
