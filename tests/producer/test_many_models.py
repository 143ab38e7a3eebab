"""Clients, commands and batches where a server has several queues with models of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis

from promptq import AsyncClient, Client
from promptq.producer.batches.local_batch import BatchOutcome, run_batch
from promptq.shared.errors import ConfigurationError, ModelNotServedError
from promptq.shared.protocol.keys import ALIASES, Keys
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue.lookups import note_queue
from promptq.shared.queue.scripts import heartbeat
from promptq.shared.server.acl import user_rules
from tests.producer.batches.conftest import NUM_TOKENS, line, read_lines, write_lines
from tests.producer.gateway.living import live_worker
from tests.producer.playing import PROMPTQ, HandWorker, Run, Start
from tests.support.model_free import running_worker, served_model_free, text_of
from tests.support.processes import Terminal, read_until
from tests.support.roles import as_role
from tests.support.waiting import async_until

QUEUES = {"default": "owl", "b": "wren"}
"""Names of models by their queues."""
REFUSED = [
    *("embed", "pictures", "prompt_logprobs", "response_format", "scores", "tool_choice"),
]
"""Fields that the model-free engine cannot serve."""


@pytest.fixture
def workers(redis_url: str) -> Iterator[None]:
    with ExitStack() as stack:
        for queue, model in QUEUES.items():
            stack.enter_context(live_worker(redis_url, served_model_free(name=model), queue=queue))
        yield


@pytest.mark.usefixtures("workers")
def test_a_client_finds_the_queue_of_a_model(redis_url: str, everything: redis.Redis) -> None:
    everything.hset(ALIASES, "gpt-4o", "wren")
    for name in ("wren", "gpt-4o"):
        with Client(redis_url, model=name) as client:
            assert client.queue.keys.queue == "b"
            assert client.generate("Hi", seed=3, max_tokens=6).text == text_of(3, 6)
    with pytest.raises(
        ModelNotServedError, match="no queue serves 'heron'; there are 'owl', 'wren'"
    ):
        Client(redis_url, model="heron")
    with pytest.raises(ConfigurationError, match="not both"):
        Client(redis_url, "b", model="wren")


@pytest.mark.usefixtures("workers")
def test_an_async_client_finds_it_too(redis_url: str) -> None:
    async def talk() -> None:
        async with AsyncClient(redis_url, model="wren") as client:
            request_id = await client.enqueue("Hi", seed=3, max_tokens=6)
            events = [event async for event in client.stream(request_id)]
            assert "".join(event.text for event in events) == text_of(3, 6)
            assert client.queue.keys.queue == "b"
        asking = AsyncClient(redis_url, model="heron")
        for _ in range(2):
            with pytest.raises(ModelNotServedError):
                await asking.stats()
        await asking.close()

    asyncio.run(talk())


@pytest.mark.usefixtures("workers")
def test_queues_that_a_user_may_not_read_are_left_out(
    redis_url: str, everything: redis.Redis
) -> None:
    everything.execute_command("ACL", "SETUSER", "one", *user_rules("producer", "b", "pw"))
    url = "redis://one:pw@" + redis_url.rpartition("@")[2]
    with Client(url, "b") as client:
        assert [model.name for model in client.models()] == ["wren"]


def test_of_several_queues_a_client_takes_the_one_with_less_to_do(
    redis_url: str, own_worker: HandWorker
) -> None:
    with Client(redis_url, "b") as b, Client(redis_url, "c") as c:
        for client, num_workers in ((b, 1), (c, 2)):
            client.queue.redis.sadd("promptq:queues", client.queue.keys.queue)
            client.queue.redis.hset(client.queue.keys.model, "model", "wren")
            for number in range(num_workers):
                stats = WorkerStats(worker_id=f"w{number}", model="wren")
                client.queue.run(heartbeat(stats, 60_000))
            for _ in range(3):
                client.enqueue("Hi")
        with Client(redis_url, model="wren") as client:
            assert client.queue.keys.queue == "c", "3 for 2 workers are less than 3 for 1"
            for _ in range(4):
                client.enqueue("Hi")
        with Client(redis_url, model="wren") as client:
            assert client.queue.keys.queue == "b"


@pytest.mark.usefixtures("workers")
def test_the_commands_about_models(run: Run, redis_url: str) -> None:
    told = run("models", "list", COLUMNS="20").stdout  # a program reads it: no cell is broken
    assert told.count(", ".join(REFUSED)) == len(QUEUES)
    assert [row.split()[:2] for row in told.splitlines()[3:] if row.strip()] == [
        ["owl", "default"],
        ["wren", "b"],
    ]
    with Client(redis_url, "old") as client:
        client.queue.run(note_queue("old"))
        client.queue.redis.hset(client.queue.keys.model, "model", "a moa")
        told = run("models", "list").stdout
        assert told.endswith(
            "No worker serves a moa. If no worker will serve it again: promptq models forget 'a"
            " moa'\n"
        )
        assert told.count("No worker serves") == 1
        assert run("models", "forget", "a moa").returncode == 0
    assert run("models", "alias", "gpt-4o", "wren").returncode == 0
    found = json.loads(run("models", "list", "--json").stdout)
    assert [(it["name"], it["aliases"]) for it in found] == [("owl", []), ("wren", ["gpt-4o"])]
    assert found[1]["queues"][0]["max_model_len"] == 4096
    assert found[1]["queues"][0]["refused"] == REFUSED
    said = run("submit", "--model", "gpt-4o", "Hi", "--seed", "3", "--max-tokens", "6").stdout
    assert said.strip() == text_of(3, 6).strip()
    for wrong, why in (
        (["alias", "owl", "wren"], "'owl' is the name of a model that is served"),
        (["alias", "x", "heron"], "no queue serves 'heron'; there are 'owl', 'wren'"),
        (["forget", "heron"], "no queue serves 'heron'"),
        (["forget", "wren"], "queue b is in use (workers: 1, requests: 0)"),
    ):
        ended = run("models", *wrong)
        assert ended.returncode == 1
        assert why in ended.stderr
    assert run("models", "forget", "gpt-4o").returncode == 0
    assert json.loads(run("models", "list", "--json").stdout)[1]["aliases"] == []


@pytest.mark.usefixtures("workers")
def test_a_request_is_found_in_its_queue(run: Run) -> None:
    request_id = run("submit", "--model", "wren", "Hi", "-d", "--seed", "3").stdout.strip()
    assert run("watch", request_id).stdout.startswith(text_of(3, 5))
    long = run("submit", "--model", "wren", "Hi", "-d", "--max-tokens", "4000").stdout.strip()
    assert run("cancel", long).returncode == 0
    assert run("cancel", "unknown").returncode == 1


def test_a_model_whose_workers_are_gone_can_be_forgotten(
    run: Run, redis_url: str, everything: redis.Redis
) -> None:
    with live_worker(redis_url, served_model_free(name="wren"), queue="b"):
        pass
    assert "wren" in run("models", "list").stdout
    with Client(redis_url, "b") as client:
        request_id = client.enqueue("Hi", delay_ms=600_000)
        assert "requests: 1" in run("models", "forget", "wren").stderr
        client.cancel(request_id)
    assert run("models", "forget", "wren").stdout == "queue b no longer has a model\n"
    assert "no models" in run("models", "list").stdout
    assert not everything.exists(Keys("b").model)
    with live_worker(redis_url, served_model_free(name="owl"), queue="b"):
        assert "owl" in run("models", "list").stdout


@pytest.mark.usefixtures("workers")
def test_lines_of_a_batch_go_to_the_queues_of_their_models(
    tmp_path: Path, redis_url: str, everything: redis.Redis
) -> None:
    everything.hset(ALIASES, "gpt-4o", "wren")
    lines = [line(number) for number in range(12)]
    models = ["owl", "wren", "gpt-4o", "heron"]
    for number, item in enumerate(lines):
        item["body"]["model"] = models[number % 4]
    source = write_lines(tmp_path / "in.jsonl", lines)
    outcome = run_batch(source, tmp_path / "out.jsonl", server=redis_url)
    assert (outcome.progress.completed, outcome.progress.failed) == (9, 3)
    for custom_id, answer in read_lines(tmp_path / "out.jsonl").items():
        number = int(custom_id.removeprefix("id-"))
        body = answer["response"]["body"]
        assert body["choices"][0]["text"] == text_of(number, NUM_TOKENS)
        assert body["model"] == ("owl" if number % 4 == 0 else "wren")
    for refused in read_lines(tmp_path / "out.errors.jsonl").values():
        assert refused["response"]["status_code"] == 404
        assert "no queue serves 'heron'" in json.dumps(refused)
    only_b = run_batch(source, tmp_path / "only-b.jsonl", server=redis_url, queue="b")
    assert only_b.progress.completed == 6


def test_a_queue_that_is_full_holds_up_no_other(
    tmp_path: Path, redis_url: str, everything: redis.Redis
) -> None:
    lines = [line(number) for number in range(40)]
    for number, item in enumerate(lines):
        item["body"]["model"] = "owl" if number < 20 else "wren"
    source = write_lines(tmp_path / "in.jsonl", lines)

    async def run() -> BatchOutcome:
        async with running_worker(redis_url, served_model_free(name="owl"), queue="default"):
            everything.hset(Keys("default").config, mapping={"paused": 1, "max_pending": 2})
            async with running_worker(redis_url, served_model_free(name="wren"), queue="b"):
                running = asyncio.create_task(
                    asyncio.to_thread(run_batch, source, tmp_path / "out.jsonl", server=redis_url)
                )
                output = tmp_path / "out.jsonl"
                await async_until(lambda: output.exists() and output.read_text().count("\n") == 20)
                everything.hdel(Keys("default").config, "paused", "max_pending")
                return await running

    outcome = asyncio.run(run())
    assert (outcome.progress.completed, outcome.progress.failed) == (40, 0)


@pytest.mark.usefixtures("workers")
def test_top_lists_the_queues_and_shows_the_next_one(run: Run, redis_url: str) -> None:
    once = run("top", "--once").stdout
    assert [it.split()[:3] for it in once.splitlines()[3:5]] == [
        ["default", "owl", "1"],
        ["b", "wren", "1"],
    ]
    assert "queue default, model owl" in once
    alone = run("top", "--once", "--queue", "b").stdout
    assert "queue b, model wren" in alone
    assert "owl" not in alone
    command = [*PROMPTQ, "top", "--redis", as_role("operator", redis_url)]
    with closing(Terminal(*command, columns=100, lines=40)) as terminal:
        terminal.read_until("queue default")
        terminal.press(b"\t")
        terminal.read_until("queue b")
        terminal.press(b"q")
        terminal.read_rest()
        assert terminal.process.wait() == 0


def test_a_model_that_is_loaded_in_its_turn_is_shown_as_such(
    run: Run, everything: redis.Redis
) -> None:
    everything.hset(Keys("default").model, mapping={"model": "owl", "standby_until": 2**53})
    heading, _, row = run("models", "list").stdout.strip().splitlines()
    assert heading.split()[-1] == "longest", "columns without a word are left out"
    assert row.split()[:4] == ["owl", "default", "on", "call"]
    for command in ("stats",), ("top", "--once"):
        assert "a worker loads it when its turn comes" in run(*command).stdout
    for over in ("1", "never"):  # long ago, and what a stranger wrote
        everything.hset(Keys("default").model, "standby_until", over)
        assert "No worker is alive" in run("stats").stdout


def test_names_that_a_stranger_wrote_are_shown_as_text(run: Run, everything: redis.Redis) -> None:
    everything.sadd("promptq:queues", "b")
    everything.hset(Keys("b").model, "model", "[/no]\x1b]0;x\x07")
    everything.hset(Keys("default").model, "model", "owl")
    everything.hset(ALIASES, "[bold]\x1b[2J", "owl")
    for command in (("models", "list"), ("top", "--once")):
        shown = run(*command, COLUMNS="200")
        assert shown.returncode == 0, shown.stderr
        assert "[/no]\\x1b]0;x" in shown.stdout
        assert "\x1b" not in shown.stdout


def test_up_runs_several_models(start: Start, run: Run, tmp_path: Path) -> None:
    models = ["--model", "model-free", "--model", "model-free"]
    collide = run("up", *models, "--queue", "a", "--queue", "a", url="")
    assert "two models would have one queue (a, a)" in collide.stderr
    too_few = run("up", *models, "--model", "model-free", "--queue", "a", "--queue", "b", url="")
    assert "(queues: 2, models: 3)" in too_few.stderr
    files = str(tmp_path / "files")
    process = start("up", *models, "--port", "0", url="", PROMPTQ_FILES_DIR=files)
    starting, is_up, _ = read_until(process, "stops everything.\n").partition("promptq is up")
    assert is_up
    assert "queue    default (model-free), 1 worker\n" in starting
    assert "queue    model-free (model-free), 1 worker\n" in starting
    ready = {line.partition(" | ")[0] for line in starting.splitlines() if " | ready" in line}
    assert ready == {"default 1", "model-free 1", "gateway", "jobs default", "jobs model-free"}
    found = json.loads(run("models", "list", "--json", url="").stdout)
    assert [view["queue"] for view in found[0]["queues"]] == ["default", "model-free"]
    process.terminate()
    process.communicate()
    assert process.returncode == 0
