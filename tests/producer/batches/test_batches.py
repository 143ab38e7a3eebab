"""Files and batches over HTTP, with OpenAI's own client, and the process that runs them."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
import redis.asyncio

from promptq import Client
from promptq.producer.admin.api_keys import ApiKey
from promptq.producer.batch_store.batch_lines import MAX_FILE_BYTES
from promptq.producer.batch_store.batch_records import Batches, new_batch
from promptq.producer.batch_store.files import FileMissingError, FileStore
from promptq.producer.batches import batch_job
from promptq.shared.queue.request_queue import AsyncRequestQueue
from promptq.shared.server.embedded import EmbeddedServer
from tests.model_free_worker import running_worker
from tests.processes import family_of, is_running, kill_all, until_ready
from tests.producer.batches.batches import (
    KEYS,
    NUM_TOKENS,
    attempts,
    expected_texts,
    finished_batch,
    line,
    pass_lease_time,
    texts_in,
    write_lines,
)
from tests.producer.gateway.living import live_gateway
from tests.producer.playing import HandWorker, Start
from tests.producer.webhooks.receiving import receiver
from tests.roles import as_role, bring_in_roles
from tests.waiting import async_until


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    with live_gateway(redis_url, files_dir=tmp_path / "files") as gateway:
        base_url = gateway.base_url
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
            yield client


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        await asyncio.sleep(0.05)


async def upload(client: openai.AsyncOpenAI, lines: list[Any]) -> str:
    text = "".join(it if isinstance(it, str) else json.dumps(it) + "\n" for it in lines)
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return file.id


async def create(client: openai.AsyncOpenAI, lines: list[Any]) -> openai.types.Batch:
    return await client.batches.create(
        input_file_id=await upload(client, lines),
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"my": "batch"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )


async def test_batches_from_upload_to_answers(
    client: openai.AsyncOpenAI, redis_url: str, tmp_path: Path, start: Start
) -> None:
    """One that completes with broken lines, one that is cancelled, one whose window ends, one that
    cannot be run."""
    files = tmp_path / "files"
    process = start("jobs", PROMPTQ_FILES_DIR=str(files), PROMPTQ_BATCH_IN_FLIGHT="4")
    await until_ready(process)
    good = [line(n) for n in range(12)]
    batch = await create(client, [*good, "{broken\n", line(99, url="/v1/chat/completions")])
    assert (batch.status, batch.metadata) == ("validating", {"my": "batch"})
    empty = await create(client, ["\n"])
    async with running_worker(redis_url):
        batch, empty = await ended(client, batch.id), await ended(client, empty.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 14, "completed": 12, "failed": 2}
    assert batch.usage is not None
    assert batch.usage.output_tokens == 12 * NUM_TOKENS
    assert batch.usage.input_tokens > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = await client.files.retrieve(batch.output_file_id)
    assert answers.expires_at == answers.created_at + 7200
    assert batch.completed_at is not None
    output = tmp_path / "output.jsonl"
    output.write_text((await client.files.content(batch.output_file_id)).text)
    assert texts_in(output) == expected_texts(range(12))
    errors = (await client.files.content(batch.error_file_id)).text.splitlines()
    assert [json.loads(it)["error"]["code"] for it in errors] == [
        "invalid_json_line", "invalid_url",
    ]  # fmt: skip
    assert empty.status == "failed"
    assert empty.errors is not None
    assert empty.errors.data is not None
    assert empty.errors.data[0].code == "empty_file"
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)

    with redis.Redis.from_url(as_role("", redis_url)) as server:
        waiting = await create(client, good)
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        [score] = {int(server.hget(key, "priority")) for key in waiting_keys(server)}
        assert score == 100, "batches come after what people wait for"
        assert (await client.batches.cancel(waiting.id)).status == "cancelling"
        waiting = await ended(client, waiting.id)
        assert (waiting.status, waiting.output_file_id) == ("cancelled", None)
        assert server.zcard(KEYS.pending) == 0
        assert waiting.error_file_id is not None
        errors = (await client.files.content(waiting.error_file_id)).text.splitlines()
        assert [json.loads(it)["error"]["code"] for it in errors] == ["batch_cancelled"] * 12
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        late = new_batch("/v1/completions", await upload(client, good), ApiKey(name="k"))
        late.expires_at = late.created_at + 1
        await Batches(AsyncRequestQueue(connection)).add(late)
    expired = await ended(client, late.id)
    assert expired.status == "expired"
    assert expired.request_counts is not None
    assert expired.request_counts.failed == 12
    assert expired.error_file_id is not None
    errors = (await client.files.content(expired.error_file_id)).text.splitlines()
    assert {json.loads(it)["error"]["code"] for it in errors} == {"batch_expired"}
    assert {json.loads(it)["custom_id"] for it in errors} == {f"id-{n}" for n in range(12)}

    page = await client.batches.list(limit=3)
    assert [it.id for it in page.data] == [expired.id, waiting.id, empty.id]
    assert [it.id async for it in client.batches.list(limit=1)] == [
        expired.id, waiting.id, empty.id, batch.id,
    ]  # fmt: skip
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait) == 0
    assert list((files / "running").iterdir()) == []


async def test_a_batch_tells_how_far_it_is(
    client: openai.AsyncOpenAI,
    redis_url: str,
    tmp_path: Path,
    own_worker: HandWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it runs, counts and usage of what is done so far."""
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(tmp_path / "files"))
    monkeypatch.setenv("PROMPTQ_BATCH_IN_FLIGHT", "3")
    batch = await create(client, ["{broken\n", *(line(n) for n in range(5))])
    running = asyncio.create_task(asyncio.to_thread(batch_job.run_batch_job, "default", batch.id))
    for done, more in ((0, 2), (2, 3)):
        while (now := await client.batches.retrieve(batch.id)).status == "validating" or (
            now.request_counts is not None and now.request_counts.completed < done
        ):
            await asyncio.sleep(0.01)
        assert (now.status, now.completed_at) == ("in_progress", None)
        assert now.in_progress_at is not None
        assert now.request_counts is not None
        assert now.request_counts.total == 6
        assert now.request_counts.completed == done
        assert now.usage is not None
        assert now.usage.output_tokens == done * len("hi")
        for _ in range(more):
            await async_until(lambda: own_worker.redis.zcard(KEYS.pending) > 0)
            own_worker.finish(own_worker.take(), "hi")
    assert now.request_counts.failed == 1
    assert await running == "completed"


def waiting_keys(server: redis.Redis) -> list[str]:
    return [KEYS.request(raw.decode()) for raw in server.zrange(KEYS.pending, 0, -1)]


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


def add_batch(url: str, files: Path, tmp_path: Path, lines: list[Any]) -> str:
    """As the gateway does it."""
    with write_lines(tmp_path / "in.jsonl", lines).open("rb") as stream:
        stored = FileStore(files).add(stream, filename="in.jsonl", purpose="batch")
    batch = new_batch("/v1/completions", stored.id, ApiKey(name="k"))

    async def add() -> None:
        async with redis.asyncio.Redis.from_url(url) as connection:
            await Batches(AsyncRequestQueue(connection)).add(batch)

    with ThreadPoolExecutor() as pool:
        pool.submit(asyncio.run, add()).result()
    return batch.id


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


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that no hard link leads to from the test's own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one disk only")
        yield Path(folder)


def with_a_file(folder: Path) -> tuple[FileStore, str]:
    """A store there with one file, and the file's id."""
    store = FileStore(folder)
    return store, store.add(io.BytesIO(b"lines"), filename="a", purpose="batch").id


def test_a_file_is_kept_on_another_disk(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no hard link leads to, it is copied, and is on the disk before it bears its name."""
    store, file_id = with_a_file(tmp_path)
    kept = other_disk / "kept"
    fsync = os.fsync
    synced: list[tuple[int, int, bool]] = []

    def looking_on(file: int) -> None:
        fsync(file)
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size, kept.exists()))

    monkeypatch.setattr(os, "fsync", looking_on)
    store.keep(file_id, "", kept)
    assert synced == [(kept.stat().st_ino, len(b"lines"), False)]
    store.delete(file_id, "")
    store.keep(file_id, "", kept)
    assert [it.name for it in other_disk.iterdir()] == ["kept"]
    assert kept.read_bytes() == b"lines"
    with pytest.raises(FileMissingError):
        store.keep(file_id, "", other_disk / "late")


def test_two_processes_copy_a_file_at_once(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose lease ran out meanwhile, and the next; its file is not missing to either."""
    store, file_id = with_a_file(tmp_path)
    kept = other_disk / "kept"
    fsync = os.fsync

    def the_next_is_faster(file: int) -> None:
        fsync(file)
        monkeypatch.setattr(os, "fsync", fsync)
        store.keep(file_id, "", kept)

    monkeypatch.setattr(os, "fsync", the_next_is_faster)
    store.keep(file_id, "", kept)
    assert kept.read_bytes() == b"lines"
    assert [it.name for it in other_disk.iterdir()] == ["kept"]


async def test_a_batch_is_its_runners_while_its_input_is_copied(
    redis_url: str, tmp_path: Path, own_worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes on a slow disk, which has no hard links."""
    files = tmp_path / "files"
    monkeypatch.setenv("PROMPTQ_REDIS_URL", as_role("jobs", redis_url))
    monkeypatch.setenv("PROMPTQ_FILES_DIR", str(files))
    monkeypatch.setattr(batch_job, "LEASE_MS", 400)  # after a quarter of it the lease is renewed
    batch_id = add_batch(redis_url, files, tmp_path, [line(0)])
    fsync = os.fsync
    left = []

    def no_hard_links(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def until_the_lease_is_renewed_or_over(file: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        fsync(file)
        key = KEYS.batch_runner(batch_id)
        left[:] = [own_worker.redis.pttl(key)] * 2
        while 0 <= left[1] <= left[0]:
            left[:] = left[1], own_worker.redis.pttl(key)

    monkeypatch.setattr(os, "link", no_hard_links)
    monkeypatch.setattr(os, "fsync", until_the_lease_is_renewed_or_over)
    async with running_worker(redis_url):
        status = await asyncio.to_thread(batch_job.run_batch_job, "default", batch_id)
    assert status == "completed"
    assert left[1] > left[0]
    assert list((files / "running").iterdir()) == []


def test_a_copy_that_breaks_off_leaves_nothing(
    tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file_id = with_a_file(tmp_path)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.keep(file_id, "", other_disk / "kept")
    assert list(other_disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_another_user_kept_is_copied() -> None:
    """Who may read it and not change its times, as on a disk that several machines share."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, file_id = with_a_file(folder)
        kept, nobody = folder / "kept", 65534
        store.keep(file_id, "", kept)
        os.utime(kept, (1, 1))
        folder.chmod(0o777)
        os.seteuid(nobody)
        try:
            store.keep(file_id, "", kept)
        finally:
            os.seteuid(0)
        assert kept.read_bytes() == b"lines"
        assert kept.stat().st_uid == nobody
        assert kept.stat().st_mtime > 1
        assert len(list(folder.iterdir())) == 3


async def test_ids_that_are_no_batch(client: openai.AsyncOpenAI, redis_url: str) -> None:
    """Whatever other keys are called, and whatever strangers wrote."""
    batch = await create(client, [line(0)])
    wrong_type, garbled = f"batch_{1:032x}", f"batch_{2:032x}"
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        server.set(KEYS.batch_runner(batch.id), "a")
        server.set(KEYS.batch(wrong_type), "a")
        server.hset(KEYS.batch(garbled), mapping={"id": "1", b"\xff": b"\xff"})
        server.hset(KEYS.batch(batch.id), b"\xff", b"\xff")
        listed = {b"caf\xe9": 1, f"{batch.id}:runner": 2, garbled: 3, wrong_type: 4}
        server.zadd(KEYS.batches_of(""), listed)
    for batch_id in (f"{batch.id}:runner", "batch_no", wrong_type, garbled):
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch_id)
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel(batch_id)
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.batches.list(after=f"{batch.id}:runner")
    assert [it.id async for it in client.batches.list()] == [batch.id]


async def test_files(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """Uploaded, listed page by page, read and deleted; and what is refused."""
    ids = [await upload(client, [line(n)]) for n in range(3)]
    other = await client.files.create(file=("a.bin", b"\0\xff"), purpose="user_data")
    assert (other.filename, other.bytes, other.purpose) == ("a.bin", 2, "user_data")
    assert [it.id async for it in client.files.list(purpose="batch", limit=2)] == ids[::-1]
    assert [it.id async for it in client.files.list(order="asc", limit=1)] == [*ids, other.id]
    assert (await client.files.content(other.id)).content == b"\0\xff"
    found = await client.files.retrieve(ids[0])
    assert found.expires_at == found.created_at + 30 * 86_400
    assert (await client.files.delete(ids[0])).deleted
    for missing in (ids[0], "file-no", "..%2F..%2Fetc%2Fpasswd"):
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(missing)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("a", b"a"), purpose="nothing")
    for wrong in ({"input_file_id": ids[0]}, {"input_file_id": other.id}):
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            await client.batches.create(
                endpoint="/v1/completions", completion_window="24h", **wrong
            )
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(
            endpoint="/v1/embeddings", completion_window="24h", input_file_id=ids[1]
        )
    for seconds in (60, 10**9):
        with pytest.raises(openai.BadRequestError, match=r"output_expires_after\.seconds"):
            await client.batches.create(
                endpoint="/v1/completions",
                completion_window="24h",
                input_file_id=ids[1],
                output_expires_after={"anchor": "created_at", "seconds": seconds},
            )
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_no")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 100_000)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=big, purpose="batch")
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    assert len(list((tmp_path / "files").glob("*.data"))) == 3


def test_files_are_swept(tmp_path: Path) -> None:
    """What is over, and what an upload that broke off left; not what is being uploaded."""
    store = FileStore(tmp_path)
    with (tmp_path / "source").open("wb+") as empty:
        kept = store.add(empty, filename="a", purpose="batch", ttl_seconds=3600)
        over = store.add(empty, filename="b", purpose="batch", ttl_seconds=-10)
    broken, coming = tmp_path / f"{over.id}f.data", tmp_path / f"{over.id}e.data"
    broken.touch()
    coming.touch()
    os.utime(broken, (1, 1))
    assert store.sweep() == 2
    assert [it.id for it in store.page("")[0]] == [kept.id]
    assert not broken.exists()
    assert coming.exists()
