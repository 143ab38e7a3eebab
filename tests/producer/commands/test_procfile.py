"""The processes of the Procfile work when a shell starts each, as runners of Procfiles do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
import redis

from promptq import Client
from tests.producer.playing import PROMPTQ, Run
from tests.support.paths import ROOT
from tests.support.processes import start as start_process
from tests.support.roles import as_role, bring_in_roles
from tests.support.servers import free_port

PROCFILE = ROOT / "Procfile"

StartType = Callable[[str, dict[str, str]], subprocess.Popen[str]]


def ready_line(process: subprocess.Popen[str]) -> str:
    """Its line that says that it is ready, once it is."""
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(r"\bready\b", line):
            return line
    raise AssertionError(f"{process.args} ended, code {process.wait()}")


@pytest.fixture
def start_type(tmp_path: Path, environment: dict[str, str]) -> Iterator[StartType]:
    """Starts a process type; what was started ends with the test."""
    lines = [line.partition(":") for line in PROCFILE.read_text().splitlines()]
    commands = {name: command for name, _, command in lines}
    assert list(commands) == ["server", "worker", "gateway", "jobs"]
    # `promptq` is this tree's, whatever is installed.
    command = tmp_path / "bin" / "promptq"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {" ".join(PROMPTQ)} "$@"\n')
    command.chmod(0o755)
    found_first = {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    started: list[subprocess.Popen[str]] = []

    def start(name: str, settings: dict[str, str]) -> subprocess.Popen[str]:
        process = start_process(
            *["sh", "-c", commands[name]],
            cwd=PROCFILE.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **found_first, **settings},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in reversed(started):
        with suppress(ProcessLookupError):  # it ended, and the test has said so
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate()


def test_every_process_type_starts_and_finds_the_others(
    start_type: StartType, run: Run, tmp_path: Path
) -> None:
    """By the port alone, and where the URL of a role is set by that."""
    port = free_port()
    settings = {
        "PROMPTQ_SERVER_PORT": str(port),
        "PROMPTQ_HTTP_PORT": "0",
        "PROMPTQ_MODEL": "model-free",
        "PROMPTQ_FILES_DIR": str(tmp_path),
    }
    ready_line(start_type("server", settings))
    url = run("url", "--port", str(port), url="").stdout.strip()
    bring_in_roles(url)
    settings["PROMPTQ_REDIS_URL_WORKER"] = as_role("worker", url)
    settings["PROMPTQ_REDIS_URL_JOBS"] = as_role("jobs", url)
    others = [start_type(name, settings) for name in ("worker", "jobs", "gateway")]
    *_, line = map(ready_line, others)
    found = re.search(r"http://\S+(?=,)", line)
    assert found is not None
    assert httpx2.get(f"{found[0]}/readyz", timeout=None).status_code == 200
    with Client(as_role("producer", url)) as client, redis.Redis.from_url(url) as connection:
        assert client.generate("Once", max_tokens=3).finish_reason == "length"
        users = {it["user"] for it in connection.client_list()}
    assert users == {"worker", "jobs", "producer", "default"}
