"""Batches from file to file: each line once, whatever dies in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from promptq import Client
from promptq.producer.batch_store import input_file
from promptq.producer.batch_store.input_file import MAX_LINE_BYTES, MAX_LINES, BatchFileError
from promptq.producer.batches.batch_journal import BatchIsRunningError
from promptq.producer.batches.local_batch import BatchOutcome, errors_beside, run_batch
from promptq.producer.batches.run_options import BatchProgress
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.pictures import data_url, picture_part
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.batches.conftest import (
    NUM_TOKENS,
    attempts,
    expected_texts,
    keys_of,
    line,
    read_lines,
    texts_in,
    write_lines,
)
from tests.producer.gateway.pictures_server import LARGE_PICTURE, PICTURE, pictures_server
from tests.producer.playing import KEYS, PROMPTQ, HandWorker, Run, Start, crash_until_dead
from tests.support.model_free import running_worker, text_of
from tests.support.processes import Terminal
from tests.support.roles import as_role, bring_in_roles
from tests.support.spoilt import SPOILT
from tests.support.waiting import async_until


async def run_beside(source: Path, output: Path, url: str, **options: Any) -> BatchOutcome:
    return await asyncio.to_thread(run_batch, source, output, server=url, **options)


async def test_every_line_is_answered(tmp_path: Path, redis_url: str) -> None:
    """In OpenAI's form, with no more lines in flight than was asked for."""
    lines = [line(n) for n in range(30)]
    for item in lines[:2]:
        item["body"]["idempotency_key"] = "the same"
    lines[2]["body"]["durability"] = "replicated"  # the server has no replica
    source = write_lines(tmp_path / "in.jsonl", lines)
    output, seen = tmp_path / "out.jsonl", []
    async with running_worker(redis_url):
        outcome = await run_beside(
            source, output, redis_url, max_in_flight=7, on_progress=seen.append
        )
    assert outcome == BatchOutcome(True, BatchProgress(30, 30, 0, 0))
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        left = [server.pttl(key) for key in server.keys(KEYS.request("*"))]
    assert len(left) == 30
    assert max(left) <= 120_000, "what is written down fills the server for two minutes only"
    assert max(progress.in_flight for progress in seen) <= 7
    assert texts_in(output) == expected_texts(range(30))
    answer = read_lines(output)["id-3"]
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["object"] == "text_completion"
    assert answer["response"]["body"]["usage"]["completion_tokens"] == NUM_TOKENS
    assert not output.with_name("out.jsonl.batch").exists(), "nothing is left to go on with"
    assert errors_beside(output).read_text() == ""


@pytest.fixture
def patient_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures may come from this machine, and take as long as a test needs."""
    monkeypatch.setattr("promptq.producer.calls.safe_http.is_public", lambda _: True)
    monkeypatch.setattr("promptq.producer.calls.picture_urls._TIMEOUT", 600.0)
    monkeypatch.setattr("promptq.producer.calls.picture_urls._MOST_SECONDS", 600.0)


def line_with_picture(number: int, url: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": [picture_part(url)]}]
    return line(number, url="/v1/chat/completions", body={"messages": messages})


@pytest.mark.usefixtures("patient_fetches")
async def test_pictures_of_lines_are_fetched(
    tmp_path: Path, redis_url: str, own_worker: HandWorker
) -> None:
    """The gateway fetches in this way, too. Meanwhile, answers of other lines are written."""
    gate = threading.Event()
    with pictures_server([], gate) as base:
        urls = [f"{base}/large", f"{base}/slow", f"{base}/none", f"file-{'0' * 32}"]
        lines = [line_with_picture(number, url) for number, url in enumerate(urls)]
        source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        running = asyncio.create_task(run_beside(source, output, redis_url))
        try:
            first = await asyncio.to_thread(own_worker.take_next)
            own_worker.finish(first, "Hi")
            [key] = own_worker.redis.keys(f"{KEYS.prefix}picture:*")
            await async_until(lambda: output.exists() and "id-0" in output.read_text())
            assert not gate.is_set()
        finally:
            gate.set()
        second = await asyncio.to_thread(own_worker.take_next)
        own_worker.finish(second, "Ho")
        assert (await running).is_complete
    sent = [json.loads(claim.payload)["messages"][0]["content"] for claim in (first, second)]
    assert sent == [[picture_part(data_url(LARGE_PICTURE))], [picture_part(data_url(PICTURE))]]
    assert 0 < own_worker.redis.pttl(key) <= 120_000
    errors = read_lines(errors_beside(output))
    said = [errors[f"id-{number}"]["response"]["body"]["error"]["message"] for number in (2, 3)]
    assert said[0].endswith("the server answered 404")
    assert said[1].endswith("there are no uploaded files here")


@pytest.mark.usefixtures("patient_fetches")
async def test_pictures_of_four_lines_are_fetched_at_once(
    tmp_path: Path, redis_url: str, own_worker: HandWorker
) -> None:
    """The fifth line, which needs no picture, waits: a batch reads only few lines ahead."""
    gate, calls = threading.Event(), list[str]()
    with pictures_server(calls, gate) as base:
        lines = [line_with_picture(number, f"{base}/slow") for number in range(4)]
        source, output = write_lines(tmp_path / "in.jsonl", [*lines, line(4)]), tmp_path / "out"
        running = asyncio.create_task(run_beside(source, output, redis_url))
        try:
            await async_until(lambda: len(calls) == 4)
            assert not own_worker.redis.keys(KEYS.request("*"))
        finally:
            gate.set()
        for _ in range(5):
            own_worker.finish(await asyncio.to_thread(own_worker.take_next), "Hi")
        assert (await running).progress == BatchProgress(5, 5, 0, 0)
    assert read_lines(output).keys() == {f"id-{number}" for number in range(5)}


async def test_answers_are_on_the_disk_before_the_server_forgets_them(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(30)])
    fsync, let_go = os.fsync, []
    with redis.Redis.from_url(as_role("", redis_url)) as server:

        def looking_on(file: int) -> None:
            left = [server.pttl(key) for key in server.keys(KEYS.request("*"))]
            let_go.append(sum(0 <= it <= 120_000 for it in left))
            fsync(file)

        monkeypatch.setattr(os, "fsync", looking_on)
        async with running_worker(redis_url):
            await run_beside(source, tmp_path / "out.jsonl", redis_url, max_in_flight=7)
    assert (let_go[0], let_go[-1]) == (0, 30)


async def test_a_file_that_changes_while_it_runs_is_not_complete(
    tmp_path: Path, redis_url: str
) -> None:
    """Lines that were cut off would be missing without a word. A deleted file is read whole."""
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(5)])
    output = tmp_path / "out.jsonl"
    async with running_worker(redis_url):
        deleted = await run_beside(
            source, output, redis_url, on_progress=lambda _: source.unlink(missing_ok=True)
        )
        assert deleted == BatchOutcome(True, BatchProgress(5, 5, 0, 0))
        write_lines(source, [line(n) for n in range(5)])
        output.unlink()
        with pytest.raises(ConfigurationError, match=r"is not the file that .* was begun with"):
            await run_beside(
                source, output, redis_url, on_progress=lambda _: write_lines(source, [line(9)])
            )


async def test_broken_lines_go_to_the_error_file(tmp_path: Path, redis_url: str) -> None:
    """And the rest runs, blank lines aside."""
    bad_body = {"prompt": "x", "temperature": 9}
    chat = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 3, "n": 2}
    lines: list[Any] = [
        line(0),
        "{not json",
        "[1]",
        line(1, custom_id=None),
        "",
        line(0),
        line(2, method="GET"),
        line(3, url="/v1/moderations"),
        line(4, body=[]),
        line(5, body=bad_body),
        line(6, body={"prompt": "x", "no_such_field": 1}),
        "x" * (MAX_LINE_BYTES + 10),
        line(7, url="/v1/chat/completions", body=chat),
        line(8),
        line(9, body={"prompt": "x", "deadline_ms": 60_000, "deadline_policy": "refuse"}),
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    async with running_worker(redis_url):
        outcome = await run_beside(source, output, redis_url)
    assert outcome == BatchOutcome(True, BatchProgress(14, 3, 11, 0))
    answers = read_lines(output)
    assert set(answers) == {"id-0", "id-7", "id-8"}
    choices = answers["id-7"]["response"]["body"]["choices"]
    assert [choice["message"]["content"] for choice in choices] == [text_of(1, 3), text_of(2, 3)]
    errors = [json.loads(text) for text in errors_beside(output).read_text().splitlines()]
    assert [item["error"]["code"] for item in errors if item["error"]] == [
        "invalid_json_line", "invalid_json_line", "missing_custom_id", "duplicate_custom_id",
        "invalid_method", "invalid_url", "invalid_body", "line_too_long",
    ]  # fmt: skip
    refused = {item["custom_id"]: item["response"] for item in errors if item["response"]}
    assert set(refused) == {"id-5", "id-6", "id-9"}
    assert refused["id-9"]["body"]["error"]["param"] == "deadline_policy"
    assert refused["id-5"]["status_code"] == 400
    assert refused["id-5"]["body"]["error"]["param"] == "temperature"
    assert refused["id-5"]["body"]["error"]["type"] == "invalid_request_error"


async def test_lines_as_people_save_them(tmp_path: Path, redis_url: str) -> None:
    """With a byte order mark, CRLF, blank lines, no newline at the end; and in other encodings,
    of which only UTF-8 is read."""
    sound = [json.dumps(line(n)).encode() for n in range(3)]
    lines = [
        b"\xef\xbb\xbf" + sound[0], b" \t\r", sound[1] + b"\r", b"",
        json.dumps(line(3, custom_id="\xe4")).replace("\\u00e4", "\xe4").encode("latin-1"),
        b"\0" * 50, b"[" * 100_000, json.dumps(line(4, custom_id="\ud800")).encode(), sound[2],
        json.dumps(line(5)).encode("utf-16"),
    ]  # fmt: skip
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    async with running_worker(redis_url):
        outcome = await run_beside(source, output, redis_url)
    assert outcome.progress == BatchProgress(8, 3, 5, 0)
    assert texts_in(output) == expected_texts(range(3))
    errors = [json.loads(text) for text in errors_beside(output).read_text().splitlines()]
    codes = [item["error"]["code"] for item in errors]
    assert codes == [*["invalid_json_line"] * 3, "missing_custom_id", "invalid_json_line"]
    assert [item["id"].rpartition("_")[2] for item in errors] == ["5", "6", "7", "8", "10"]


async def test_a_killed_run_goes_on_without_running_a_line_twice(
    tmp_path: Path, redis_url: str, start: Start
) -> None:
    """Killed twice: with lines waiting in the queue, and with lines written down."""
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(200)])
    output = tmp_path / "out.jsonl"
    command = ["batch", "run", str(source), "-o", str(output), "--in-flight", "4"]
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        first = start(*command)
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        first.kill()
        async with running_worker(redis_url):
            second = start(*command)
            await async_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 10)
            second.kill()
            assert second.wait() == -signal.SIGKILL
            num_written = output.read_bytes().count(b"\n")
            assert num_written < 200
            with output.open("ab") as torn:
                torn.write(b'{"id":"batch_req_torn_99","custom_id":"id-')
            third = await asyncio.to_thread(start(*command, "--json").communicate)
        assert json.loads(third[0]) == {
            "is_complete": True, "total": 200, "completed": 200, "failed": 0,
        }  # fmt: skip
        assert attempts(server) == [1] * 200, "each line was enqueued once, and begun once"
    assert texts_in(output) == expected_texts(range(200))


WITH_A_CLIENT_AND_THE_COMMAND_ALONE = """
import sys
from promptq.shared.runtime import extras

for package in ("fastapi", "httptools", "prometheus_client", "structlog", "uvicorn", "uvloop"):
    sys.modules[package] = None
extras._is_installed = {"rich", "typer"}.__contains__
from promptq.producer.cli import main

main()
"""


async def test_the_command_needs_no_package_of_the_gateway(tmp_path: Path, redis_url: str) -> None:
    """Its log is beside its output."""
    asked = line(0)
    asked["body"]["user"] = "a"
    source = write_lines(tmp_path / "in.jsonl", [asked])
    command = ["batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--json"]
    program = [sys.executable, "-P", "-c", WITH_A_CLIENT_AND_THE_COMMAND_ALONE, *command]
    async with running_worker(redis_url):
        ended = await asyncio.to_thread(
            subprocess.run,
            [*program, "--redis", redis_url],
            capture_output=True,
            text=True,
        )
    assert ended.stderr == "a field of a call has no effect: user\n"
    counts = {"total": 1, "completed": 1, "failed": 0}
    assert json.loads(ended.stdout) == {"is_complete": True, **counts}


def test_a_terminal_sees_how_far_it_is(
    tmp_path: Path, redis_url: str, environment: dict[str, str], own_worker: HandWorker
) -> None:
    """A bar with counts, which follows what is done."""
    lines = ["{broken", *(line(n) for n in range(5))]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    terminal = Terminal(
        *[*PROMPTQ, "batch", "run", str(source), "-o", str(output), "--in-flight", "3"],
        streams=["stderr"],
        stdout=subprocess.PIPE,
        env={**environment, "PROMPTQ_REDIS_URL": redis_url, "TERM": "xterm"},
    )
    for done, in_flight in ((0, 3), (1, 3), (2, 3), (3, 2), (4, 1), (5, 0)):
        wanted = f"{done + 1}/6 1 failed, {in_flight} in flight"
        while wanted not in terminal.plain:
            assert terminal.read(), terminal.shown
        if in_flight:
            own_worker.finish(own_worker.take())
    assert "in.jsonl ━" in terminal.plain
    told, _ = terminal.process.communicate()
    terminal.close()
    assert terminal.process.returncode == 0
    failed = f"1 failed, see {errors_beside(output)}"
    assert told.decode() == f"5 of 6 lines answered in {output}; {failed}\n"


async def test_an_interrupt_ends_in_order(tmp_path: Path, redis_url: str, start: Start) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(9)])
    output = tmp_path / "out.jsonl"
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        process = start("batch", "run", str(source), "-o", str(output), "--in-flight", "4")
        await async_until(lambda: server.zcard(KEYS.pending) == 4)
        process.send_signal(signal.SIGINT)
        told, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 130
        assert "stopped after 0 of 9 lines" in told
        async with running_worker(redis_url):
            outcome = await run_beside(source, output, redis_url)
        assert outcome.is_complete
        assert attempts(server) == [1] * 9


async def test_an_interrupt_while_the_server_is_away(tmp_path: Path, start: Start) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(9)])
    with EmbeddedServer() as server:
        bring_in_roles(server.url)
        url = as_role("producer", server.url)
        process = start("batch", "run", str(source), "-o", str(tmp_path / "out.jsonl"), url=url)
        with redis.Redis.from_url(server.url) as connection:
            await async_until(lambda: connection.zcard(KEYS.pending) == 9)
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGINT)
    told, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 130
    assert "stopped after 0 of 9 lines" in told


async def test_the_server_restarts(tmp_path: Path) -> None:
    """With its data kept, no line is lost and none runs twice; without, what it lost runs again."""
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(20)])
    output = tmp_path / "out.jsonl"
    server = EmbeddedServer(data_dir=tmp_path / "data")
    bring_in_roles(server.url)
    port, url = server.port, server.url
    with redis.Redis.from_url(as_role("", url)) as connection:
        running = asyncio.create_task(run_beside(source, output, url, max_in_flight=10))
        await async_until(lambda: connection.zcard(KEYS.pending) == 10)
    server.stop()
    await asyncio.sleep(0.05)
    server = EmbeddedServer(port, tmp_path / "data", password=server.password)
    bring_in_roles(server.url)
    try:
        with redis.Redis.from_url(as_role("", url)) as connection:
            assert connection.zcard(KEYS.pending) == 10
            async with running_worker(url):
                await async_until(lambda: output.read_bytes().count(b"\n") >= 10)
                assert (await running).is_complete
            assert attempts(connection) == [1] * 20
            assert texts_in(output) == expected_texts(range(20))
            other = tmp_path / "other.jsonl"
            running = asyncio.create_task(run_beside(source, other, url, max_in_flight=10))
            await async_until(lambda: connection.zcard(KEYS.pending) == 10)
            connection.flushall()
            async with running_worker(url):
                assert (await running).is_complete
            assert texts_in(other) == expected_texts(range(20))
    finally:
        server.stop()


async def test_a_full_queue_is_waited_for(tmp_path: Path, redis_url: str) -> None:
    """But not by a line that no room would ever be enough for."""
    lines = [line(n) for n in range(12)]
    lines[5]["body"]["n"] = 3
    source = write_lines(tmp_path / "in.jsonl", lines)
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        server.hset(KEYS.config, "max_pending", 2)
        running = asyncio.create_task(
            run_beside(source, tmp_path / "out.jsonl", redis_url, max_in_flight=8)
        )
        await async_until(lambda: server.zcard(KEYS.pending) == 2)
        async with running_worker(redis_url):
            outcome = await running
    assert outcome.progress == BatchProgress(12, 11, 1, 0)
    [refused] = read_lines(errors_beside(tmp_path / "out.jsonl")).values()
    assert refused["custom_id"] == "id-5"
    assert refused["response"]["status_code"] == 429
    assert "max_pending" in refused["response"]["body"]["error"]["message"]


async def test_requests_that_others_end(tmp_path: Path, redis_url: str) -> None:
    """Cancelled and past its deadline: both are errors of their line alone."""
    late = line(1, body={"prompt": "x", "deadline_ms": 1})
    source = write_lines(tmp_path / "in.jsonl", [line(0), late, line(2)])
    output = tmp_path / "out.jsonl"
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        running = asyncio.create_task(run_beside(source, output, redis_url))
        await async_until(lambda: server.zcard(KEYS.pending) == 3)
        [cancelled] = keys_of(server, "line 2")
        server.hset(cancelled, "cancelled", 1)
        async with running_worker(redis_url):
            assert (await running).progress == BatchProgress(3, 1, 2, 0)
    errors = read_lines(errors_beside(output))
    assert errors["id-1"]["error"]["code"] == "request_expired"
    assert errors["id-2"]["error"]["code"] == "request_cancelled"


async def test_a_dead_letter_is_kept_though_its_line_is_written_down(
    tmp_path: Path, redis_url: str, own_worker: HandWorker
) -> None:
    """For whoever looks why it crashed its workers, and for another try."""
    source = write_lines(tmp_path / "in.jsonl", [line(0), line(1)])
    output = tmp_path / "out.jsonl"
    running = asyncio.create_task(run_beside(source, output, redis_url))
    await async_until(lambda: own_worker.redis.zcard(KEYS.pending) == 2)
    own_worker.finish(own_worker.take(), "hi")
    [poison] = (it.decode() for it in own_worker.redis.zrange(KEYS.pending, 0, -1))
    crash_until_dead(redis_url, poison)
    assert (await running).progress == BatchProgress(2, 1, 1, 0)
    [failed] = read_lines(errors_beside(output)).values()
    assert failed["response"]["body"]["error"]["code"] == "dead_letter"
    assert own_worker.redis.pttl(KEYS.request(poison)) == -1
    with Client(redis_url) as client:
        assert [it.request_id for it in client.dead_letters()] == [poison]
        assert client.dead_letter(poison).crashes == 2
        client.requeue(poison)
    again = own_worker.take()
    assert again.payload == own_worker.redis.hget(KEYS.request(poison), "payload")


def test_files_that_cannot_be_run(tmp_path: Path, redis_url: str) -> None:
    """No file, an empty one, one with too many lines, an output that is taken or in use."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(BatchFileError, match="does not exist"):
        run_batch(source, output, server=redis_url)
    source.write_text("\n \n")
    with pytest.raises(BatchFileError, match="no lines"):
        run_batch(source, output, server=redis_url)
    source.write_text("{}\n" * (MAX_LINES + 1))
    with pytest.raises(BatchFileError, match=f"more than the {MAX_LINES} lines"):
        run_batch(source, output, server=redis_url)
    with source.open("wb") as file:
        file.truncate(201 * 1024 * 1024)
    with pytest.raises(BatchFileError, match="more than the 209715200 allowed"):
        run_batch(source, output, server=redis_url)
    write_lines(source, [line(0)])
    folder = tmp_path / "folder"
    folder.mkdir()
    for wrong, errors in (
        (folder, None), (source, None), (source / "out.jsonl", None), (output, output),
        (output, source), (output, folder), (output, tmp_path / "out.jsonl.batch"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError):
            run_batch(source, wrong, error_file=errors, server=redis_url)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["folder", "in.jsonl"]
    output.write_text("mine\n")
    with pytest.raises(ConfigurationError, match="exists already"):
        run_batch(source, output, server=redis_url)
    assert output.read_text() == "mine\n"


async def test_one_process_at_a_time(
    tmp_path: Path, redis_url: str, start: Start, run: Run
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", [line(0)]), tmp_path / "out.jsonl"
    command = ["batch", "run", str(source), "-o", str(output)]
    with redis.Redis.from_url(as_role("", redis_url)) as server:
        start(*command)
        await async_until(lambda: server.zcard(KEYS.pending) == 1)
    with pytest.raises(BatchIsRunningError, match="another process"):
        await run_beside(source, output, redis_url)
    write_lines(source, [line(1)])
    refused: subprocess.CompletedProcess[str] = await asyncio.to_thread(run, *command)
    assert refused.returncode == 1
    assert "is not the file that" in refused.stderr


def test_a_file_of_line_breaks_is_refused_by_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of it is looked at. As many blank lines as lines are allowed."""
    source = tmp_path / "in.jsonl"
    source.write_text("\n" * input_file.MAX_BLANK_LINES + "{}\n")
    assert input_file.count_lines(source) == 1
    monkeypatch.setattr(input_file, "lines_at", lambda _: pytest.fail("a line was read"))
    for breaks in ("\n", "\r\n", " \n"):
        source.write_text(breaks * (MAX_LINES + input_file.MAX_BLANK_LINES + 1), newline="")
        with pytest.raises(BatchFileError, match="50000 blank ones") as refused:
            input_file.count_lines(source)
        assert refused.value.code == "too_many_lines"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_file_in_another_encoding_is_refused_as_what_it_is(tmp_path: Path, encoding: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line(0)) + "\n", encoding=encoding)
    with pytest.raises(BatchFileError, match=f"the file is {encoding}"):
        input_file.count_lines(source)
    source.write_text(json.dumps(line(0)) + "\n", encoding="utf-8-sig")
    assert input_file.count_lines(source) == 1


async def test_characters_that_end_a_line_elsewhere_end_none_here(
    tmp_path: Path, redis_url: str, own_worker: HandWorker
) -> None:
    """Readers that split text at U+0085, U+2028 and U+2029 find whole lines."""
    ends = "a\x85b\u2028c\u2029d"
    sound = {"model": "", "prompt": ends, "max_tokens": 9}
    lines = [line(0, body=sound, custom_id=ends), line(1, url=ends)]
    texts = [json.dumps(it, ensure_ascii=False) for it in lines]
    source = write_lines(tmp_path / "in.jsonl", [*texts])
    output = tmp_path / "out.jsonl"
    with own_worker.finishing([f"é{ends}"]):
        outcome = await run_beside(source, output, redis_url)
    assert outcome.progress == BatchProgress(2, 1, 1, 0)
    assert texts_in(output) == {ends: f"é{ends}"}
    assert "é" in output.read_text(), "other characters are written as they are"
    [refused] = read_lines(errors_beside(output)).values()
    assert repr(ends) in refused["error"]["message"]


async def test_lines_whose_records_are_spoilt_fail_alone(
    tmp_path: Path, redis_url: str, own_worker: HandWorker
) -> None:
    """Whatever a stranger wrote in the place of a result; the others are answered."""
    values = [*SPOILT.values(), None]
    source = write_lines(tmp_path / "in.jsonl", [line(n) for n in range(len(values) + 1)])
    output = tmp_path / "out.jsonl"
    running = asyncio.create_task(run_beside(source, output, redis_url, max_in_flight=100))
    await async_until(lambda: own_worker.queue.count() == len(values) + 1)
    for value in values:
        claim = own_worker.take()
        spoilt = {"state": "completed"} if value is None else {"state": "failed", "result": value}
        own_worker.redis.hset(KEYS.request(claim.request_id), mapping=spoilt)
    sound = own_worker.take()  # any line: several are enqueued at once
    own_worker.finish(sound, "Well")
    outcome = await running
    number = json.loads(sound.payload)["seed"]
    assert texts_in(output) == {f"id-{number}": "Well"}
    assert outcome.progress == BatchProgress(len(values) + 1, 1, len(values), 0)
    errors = read_lines(errors_beside(output)).values()
    assert {it["response"]["body"]["error"]["code"] for it in errors} == {"spoilt_record"}
