"""`promptq up`, `worker` and `server`: processes that start, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from promptq.producer.commands.local_fleet.up import beside
from promptq.shared.protocol.keys import Keys
from promptq.shared.server.advertised import advertised
from promptq.shared.server.connection import without_password
from promptq.shared.server.embedded import EmbeddedServer
from tests.producer.playing import KEYS, HandWorker, Run, Start
from tests.support.processes import family_of, is_running, read_until
from tests.support.servers import free_port
from tests.support.waiting import until


def test_worker_passes_everything_on(run: Run, start: Start, own_worker: HandWorker) -> None:
    """`promptq worker` is the worker: same options, same signals."""
    described = run("worker", "--help").stdout
    assert "--max-num-seqs" in described
    assert max(map(len, described.splitlines())) <= 80
    process = start("worker", "--model", "model-free", "--queue", "other")
    assert "queue other" in read_until(process, "\n")
    control = Keys("other").control
    until(lambda: dict(own_worker.redis.pubsub_numsub(control))[control.encode()])
    process.terminate()
    assert process.wait() == 0


def test_up_serves_and_ends_cleanly(run: Run, start: Start, tmp_path: Path) -> None:
    """One terminal runs all of it; another finds it without an address; Ctrl-C leaves nothing."""
    port = free_port()
    options = ["--model", "model-free", "--workers", "2", "--port", str(port)]
    process = start("up", *options, url="", PROMPTQ_FILES_DIR=str(tmp_path / "files"))
    welcome = read_until(process, "stops everything.\n")
    url = run("url", url="").stdout.strip()
    assert without_password(url) in welcome
    assert str(urlsplit(url).password) not in welcome
    assert 'redis-cli -u "$(promptq url)" ' in welcome
    assert "id=$(date +%s)" in welcome
    assert re.findall(r"(?:request|tokens):([^\"']+)", welcome) == ["$id", "$id"], "new each time"
    assert f"http://127.0.0.1:{port}/ is the dashboard" in welcome
    before, _, _ = welcome.partition("promptq is up")
    for name in ("worker 1", "worker 2", "gateway", "jobs"):
        assert f"\n{name} | ready" in before, "what is shown as up is up"
    asked = json.dumps({"prompt": "Hi", "max_tokens": 3}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", asked) as answer:
        assert len(json.load(answer)["choices"][0]["text"]) == 3
    with redis.Redis.from_url(url) as connection:
        until(lambda: connection.exists(KEYS.upkeep))  # which is the jobs' work
    assert run("submit", "Hi", "--max-tokens", "3", "--seed", "1", url="").stdout != ""
    workers = json.loads(run("stats", "--json", url="").stdout)["workers"]
    assert len(workers) == 2
    family = family_of(process.pid)
    assert {worker["pid"] for worker in workers} < set(family)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert "answered" not in shown, "calls over HTTP push the welcome away"
    until(lambda: not any(map(is_running, family)))
    assert "there is no Redis server" in run("stats", url="").stderr


def test_a_second_server_says_which_one_commands_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with EmbeddedServer(is_advertised=True) as first:
        assert beside(first.url) == []
        with EmbeddedServer(is_advertised=True) as second:
            said = " ".join(beside(second.url))
            assert advertised() == second.url
            assert f"Another embedded server runs on port {first.port}." in said
            assert f"now use this server, on port {second.port}, until it ends" in said
            assert f'--redis "$(promptq url --port {first.port})"' in said
            assert advertised(first.port) == first.url


def test_a_second_up_says_so_before_its_workers_load(start: Start) -> None:
    first = start("up", "--model", "model-free", url="")
    assert "Another embedded server" not in read_until(first, "stops everything.\n")
    second = start("up", "--model", "model-free", url="")
    assert "Another embedded server runs on port" in read_until(second, "worker 1 | ")
    for process in (second, first):
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_up_uses_a_server_that_is_there(start: Start, own_worker: HandWorker) -> None:
    """With a URL it starts workers alone; they take their leave, and the server stays."""
    process = start("up", "--model", "model-free")
    welcome = read_until(process, "stops everything.\n")
    assert "(yours)" in welcome
    assert "off  (--port 8000: gateway, dashboard and jobs, too)" in welcome
    process.terminate()
    process.communicate()
    assert process.returncode == 0
    assert own_worker.redis.zcard(KEYS.workers) == 0


@pytest.mark.parametrize("has_own_server", [True, False])
def test_up_that_is_killed_leaves_nothing(run: Run, start: Start, has_own_server: bool) -> None:
    """Server and workers end with their owner, however it ends; a server of the user's stays."""
    where = {"url": ""} if has_own_server else {}
    process = start("up", "--model", "model-free", **where)
    read_until(process, "ready after ")
    [worker] = json.loads(run("stats", "--json", **where).stdout)["workers"]
    process.kill()
    process.wait()
    until(lambda: not is_running(worker["pid"]))
    if has_own_server:
        until(lambda: run("stats", url="").returncode == 1)
    else:
        assert run("stats").returncode == 0


def test_up_starts_a_dead_worker_again(run: Run, start: Start) -> None:
    """A worker that is killed is replaced, and the screen says so."""
    process = start("up", "--model", "model-free", url="")
    read_until(process, "ready after ")
    [worker] = json.loads(run("stats", "--json", url="").stdout)["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert "ended with exit code 137" in read_until(process, "ready after ")
    assert run("submit", "Hi", "--max-tokens", "3", url="").returncode == 0
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 0


def test_up_gives_up_on_workers_that_cannot_start(start: Start) -> None:
    """The cause is shown once, and nothing is shown as up."""
    process = start("up", "--model", "/no/such/model", "--port", "0", url="")
    shown, errors = process.communicate()
    assert process.returncode == 1
    assert errors == "promptq: worker 1 ended with exit code 1; its last lines are above\n"
    [cause] = [line for line in shown.splitlines() if "/no/such/model" in line]
    assert cause.startswith("worker 1 | promptq worker: /no/such/model: there is no such directory")
    assert "promptq is up" not in shown


def test_up_on_a_port_that_is_taken(run: Run, redis_url: str) -> None:
    """A port asked for is not silently another one."""
    port = str(urlsplit(redis_url).port)
    done = run("up", "--redis-port", port, url="")
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_up_keeps_data(run: Run, start: Start, tmp_path: Path) -> None:
    """Requests that waited in a server with a folder are there after a restart."""
    data = tmp_path / "data"
    for is_second in (False, True):
        process = start("up", "--data", str(data), "--workers", "0", url="")
        read_until(process, "stops everything.\n")
        if is_second:
            assert json.loads(run("stats", "--json", url="").stdout)["waiting"] == 1
        else:
            run("submit", "--detach", "Hi", url="")
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_server_alone(run: Run, start: Start) -> None:
    """A server for workers and producers of other terminals, until it is told to stop."""
    port = str(free_port())
    process = start("server", "--port", port, url="")
    assert f":{port}/" in read_until(process, "\n")
    assert run("stats", url="").returncode == 0
    process.terminate()
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    assert run("stats", url="").returncode == 1
