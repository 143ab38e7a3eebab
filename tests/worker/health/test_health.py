"""A worker reports its health to Kubernetes and systemd, from its start to its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from promptq import Client
from promptq.worker.health.probes import PATHS, Health, HealthServer
from tests.support.processes import running
from tests.support.roles import as_role
from tests.support.servers import free_port
from tests.support.waiting import until


def asked(url: str) -> tuple[int, str]:
    """The status of a reply, and what it says."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, json.load(reply)["status"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["status"]


@pytest.mark.parametrize(
    ("health", "replies"),
    [
        (Health(), [(503, "loading the model"), (200, "alive"), (503, "loading the model")]),
        (
            Health(has_started=True, is_claiming=True),
            [(200, "started"), (200, "alive"), (200, "ready")],
        ),
        (
            Health(has_started=True),
            [(200, "started"), (200, "alive"), (503, "takes no requests")],
        ),
        (
            Health(has_started=True, is_claiming=True, hangs="the engine"),
            [
                (200, "started"),
                (503, "the engine makes no progress"),
                (503, "the engine makes no progress"),
            ],
        ),
    ],
)
def test_each_probe_says_how_a_worker_is(health: Health, replies: list[tuple[int, str]]) -> None:
    server = HealthServer(lambda: health, "127.0.0.1", 0)
    try:
        assert [asked(server.url + path) for path in PATHS] == replies
        status, told = asked(f"{server.url}/healthz")
        assert status == 404
        assert "/livez" in told
    finally:
        server.close()


@pytest.fixture
def notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        yield manager


def read_until_silence(manager: socket.socket) -> None:
    """Until nothing has come for many times as long as between two messages."""
    manager.settimeout(1.0)
    with suppress(TimeoutError):
        while True:
            manager.recv(100)


@pytest.mark.parametrize(
    "models", [[], ["--model", "model-free", "--queue", "default", "--queue", "other"]]
)
def test_a_worker_reports_its_start_its_life_and_its_end(
    redis_url: str, notified: socket.socket, models: list[str]
) -> None:
    """One of several models too: its processes are no matter of the service manager."""
    port = free_port()
    command = [sys.executable, "-m", "promptq.worker", "--model", "model-free", *models]
    command += ["--redis", as_role("worker", redis_url), "--health-port", str(port)]
    with running(*command, "--drain-seconds", "60") as worker:
        assert notified.recv(100) == b"READY=1"
        assert asked(f"http://127.0.0.1:{port}/readyz") == (200, "ready")
        assert notified.recv(100) == b"WATCHDOG=1"
        with Client(as_role("producer", redis_url)) as client:
            long = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
            request_ids = client.enqueue_many([long] * 64)  # so that they take some seconds
            next(client.stream(request_ids[0]))
            worker.send_signal(signal.SIGTERM)
            until(lambda: notified.recv(100) == b"STOPPING=1")
            assert asked(f"http://127.0.0.1:{port}/readyz") == (503, "takes no requests")
            assert asked(f"http://127.0.0.1:{port}/livez") == (200, "alive")
            for request_id in request_ids:
                client.cancel(request_id)
        assert worker.wait() == 0


def test_a_frozen_worker_sends_the_service_manager_nothing(
    redis_url: str, notified: socket.socket
) -> None:
    command = [sys.executable, "-m", "promptq.worker", "--model", "model-free"]
    with running(*command, "--redis", as_role("worker", redis_url)) as worker:
        until(lambda: notified.recv(100) == b"WATCHDOG=1")
        worker.send_signal(signal.SIGSTOP)
        read_until_silence(notified)
        worker.send_signal(signal.SIGCONT)
        notified.settimeout(60)
        assert notified.recv(100) == b"WATCHDOG=1"


def test_a_port_that_is_taken_is_named(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "promptq.worker", "--model", "model-free"]
        command += ["--redis", as_role("worker", redis_url), "--health-port", port]
        with running(*command, stderr=-1, text=True) as worker:
            _, told = worker.communicate()
    assert re.search(rf"--health-port: cannot listen at 127.0.0.1:{port}", told)
    assert worker.returncode == 1
