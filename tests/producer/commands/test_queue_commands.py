"""Commands and calls about a whole queue: pause, resume, drain, and its dead letters."""

from __future__ import annotations

import io
import json
import re
import subprocess
from typing import Any

import pytest

from promptq import Client
from promptq.producer.admin.dead_letters import DeadLetter
from promptq.producer.commands.screens.render import dead_letters_table
from promptq.producer.commands.screens.terminal import SafeConsole
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.replies import PriorityStatus
from promptq.shared.protocol.request import RequestState
from promptq.shared.protocol.worker_stats import WorkerStats
from promptq.shared.queue import scripts
from promptq.shared.queue.request_queue import new_request_id
from tests.producer.playing import KEYS, HandWorker, Run, Start, bury
from tests.support.model_free import text_of


def test_stats_show_what_affinity_does_while_it_is_on(run: Run, redis_url: str) -> None:
    counts = {"affinity_held": 1200, "affinity_missed": 3, "affinity_left": 2}
    stats = WorkerStats(worker_id="w", affinity_cached_tokens=45_000, **counts)
    with Client(redis_url) as client:
        client.queue.run(scripts.heartbeat(stats, 60_000))
        assert "affinity:" not in run("stats").stdout
        client.queue.redis.hset(KEYS.config, "affinity_ms", 100)
    line = (
        "affinity: 1,200 hits, 3 misses; 2 requests waited for another worker; 45,000 prompt tokens"
        " from the cache"
    )
    assert line in " ".join(run("stats").stdout.split())
    shown = json.loads(run("stats", "--json").stdout)["affinity"]
    assert shown == {"held": 1200, "missed": 3, "left": 2, "cached_tokens": 45_000}


def test_dead_list_and_show(run: Run, redis_url: str) -> None:
    assert "no dead letters" in run("dead", "list").stdout
    bury(redis_url, "one", "two")
    listed = run("dead", "list").stdout
    assert re.search(r"one .*2 .*\[bold\]boom", listed)
    assert "two" in listed
    letters = json.loads(run("dead", "list", "--json").stdout)
    assert [letter["request_id"] for letter in letters] == ["two", "one"], "the latest first"
    assert len(json.loads(run("dead", "list", "--json", "--limit", "1").stdout)) == 1
    shown = run("dead", "show", "one").stdout
    assert "2 crashes" in shown
    assert re.search(r"attempt 2 on victim, .* to .*: crashed alone", shown)
    assert '"prompt":"[bold]boom[/]"' in shown
    letter = json.loads(run("dead", "show", "one", "--json").stdout)
    assert [attempt["how"] for attempt in letter["history"]] == ["crashed", "crashed alone"]
    assert letter["num_tokens"] == 2
    gone = run("dead", "show", "three")
    assert (gone.returncode, gone.stderr) == (1, "promptq: 'three' is not a dead letter\n")


@pytest.mark.parametrize("width", [60, 80])
def test_ids_of_dead_letters_are_whole_in_a_narrow_terminal(width: int) -> None:
    ids = [new_request_id() for _ in range(2)]
    payload = '{"prompt":"' + "x" * 100 + '"}'
    letters = [
        DeadLetter(
            request_id=each, payload=payload, message="it crashed its workers",
            num_tokens=2, crashes=2, attempts=2, buried_at=10**12, history=[],
        )
        for each in ids
    ]  # fmt: skip
    console = SafeConsole(file=io.StringIO(), width=width)
    console.print(dead_letters_table(letters, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if '{"prompt' in line]
    assert [row.split()[0] for row in rows] == ids
    assert ("2001-09-0" in rows[0]) == (width == 80)


def test_dead_requeue_and_purge(run: Run, redis_url: str) -> None:
    bury(redis_url, "one", "two", "three")
    new_id = json.loads(run("dead", "requeue", "one", "--json").stdout)["requeued"]["one"]
    with Client(redis_url) as client:
        assert client.state(new_id) is RequestState.WAITING
    assert run("dead", "requeue", "one").returncode == 1
    assert "purged 1 of 2" in run("dead", "purge", "two", "one").stdout
    assert run("dead", "purge", "two").returncode == 1
    assert run("dead", "purge").returncode == 2, "neither ids nor --all"
    for command in ("purge", "requeue"):
        assert run("dead", command, "three", "--all").returncode == 2, "both"
    assert json.loads(run("dead", "purge", "--all", "--json").stdout) == {"purged": 1}
    assert "no dead letters" in run("dead", "list").stdout
    assert json.loads(run("dead", "requeue", "--all", "--json").stdout) == {"requeued": {}}
    assert run("dead", "requeue", "--all").stdout == "no dead letters\n"


def test_pause_and_resume(run: Run, own_worker: HandWorker, redis_url: str) -> None:
    with Client(redis_url) as client:
        assert json.loads(run("pause", "--json").stdout) == {"paused": True}
        request_id = client.enqueue("Hi")
        assert client.stats().paused
        assert own_worker.queue.take(timeout=0.1) is None
        assert "resumed" in run("resume").stdout
        claim = own_worker.take()
        assert claim.request_id == request_id


def test_resuming_wakes_workers_at_once(own_worker: HandWorker, redis_url: str) -> None:
    with Client(redis_url) as client, own_worker.redis.pubsub() as channel:
        channel.subscribe(KEYS.control)
        messages = channel.listen()
        assert next(messages)["type"] == "subscribe"
        client.pause()
        client.resume()
        assert next(messages)["data"] == b"pending"


def ready_worker(start: Start) -> subprocess.Popen[str]:
    process = start("worker", "--model", "model-free")
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    return process


def test_drain_ends_real_workers_after_what_they_run(
    run: Run,
    start: Start,
    redis_url: str,
) -> None:
    with Client(redis_url) as client:
        assert "no worker is alive" in run("drain").stdout
        worker = ready_worker(start)
        request_id = client.enqueue("Hi", seed=3, max_tokens=3000)
        next(iter(client.stream(request_id)))
        (alive,) = client.stats().workers
        for wrong in (["another"], ["another", "--json"], [""]):  # "": a slip of the shell's
            done = run("drain", "--worker", *wrong)
            said = f"promptq: no worker {wrong[0]!r} is alive; these are: {alive.worker_id}\n"
            assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
        assert worker.poll() is None
        assert json.loads(run("drain", "--json").stdout) == {"workers": [alive.worker_id]}
        assert worker.wait() == 0
        assert client.result(request_id).text == text_of(3, 3000)
        assert client.stats().workers == []


def test_drain_one_of_two(run: Run, start: Start, redis_url: str) -> None:
    workers = [ready_worker(start), ready_worker(start)]
    with Client(redis_url) as client:
        by_pid = {it.pid: it.worker_id for it in client.stats().workers}
        said = run("drain", "--worker", by_pid[workers[0].pid]).stdout
        assert said == f"{by_pid[workers[0].pid]} finishes its requests and exits\n"
        assert workers[0].wait() == 0
        assert workers[1].poll() is None
        assert client.generate("Hi", seed=1, max_tokens=3).text == text_of(1, 3)


def test_each_client_has_the_same_calls(any_client: Any, redis_url: str) -> None:
    bury(redis_url, "one", "two")
    assert any_client.dead_ids() == ["two", "one"]
    assert any_client.dead_ids(1) == ["two"]
    assert [letter.request_id for letter in any_client.dead_letters()] == ["two", "one"]
    letter = any_client.dead_letter("one")
    assert (letter.crashes, letter.attempts, letter.num_tokens) == (2, 2, 2)
    new_id = any_client.requeue("one")
    assert any_client.state(new_id) is RequestState.WAITING
    with pytest.raises(RequestNotFoundError, match="'one'"):
        any_client.requeue("one")
    assert any_client.purge(["two", "nobody"]) == 1
    assert any_client.dead_letters() == []
    with pytest.raises(RequestNotFoundError, match="'two'"):
        any_client.dead_letter("two")
    assert any_client.reprioritise(new_id, -3) is PriorityStatus.CHANGED
    any_client.pause()
    assert any_client.stats().paused
    any_client.resume()
    assert not any_client.stats().paused
    assert any_client.drain() == []


def test_reprioritise(run: Run, own_worker: HandWorker, redis_url: str) -> None:
    with Client(redis_url) as client:
        for request_id in ("a", "b"):
            client.enqueue("Hi", request_id=request_id)
    assert "priority -5" in run("reprioritise", "b", "--priority", "-5").stdout
    assert own_worker.take().request_id == "b"
    assert "a worker holds the request" in run("reprioritise", "b", "--priority", "0").stdout
    unknown = run("reprioritise", "c", "--priority", "0")
    assert unknown.returncode == 1
    assert "'c'" in unknown.stderr


def test_scaling_says_how_many_workers_and_why(run: Run, redis_url: str) -> None:
    with Client(redis_url, "chat") as client:
        client.enqueue("Hi")
    told = json.loads(run("scaling", "--queue", "chat", "--json").stdout)
    assert (told["queue"], told["desired"], told["reason"]) == ("chat", 1, "some_work")
    assert re.search(r"chat +0 +1 +one worker is enough", run("scaling", "--queue", "chat").stdout)
    [own] = json.loads(run("scaling", "--json").stdout)
    assert (own["queue"], own["desired"]) == ("default", 0)
    wrong = run("scaling", "--target", "0")
    assert (wrong.returncode, "--target" in wrong.stderr) == (2, True)
