"""One request_id from the gateway to the worker, in every line about a request."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from producer import Client
from tests.roles import as_role

GATEWAY = """
import sys
import uvicorn
from producer.gateway.app import create_app
from producer.gateway.context import ThisGateway
from producer.gateway.settings import GatewaySettings
from shared.logs import bind, configure_logs

configure_logs("info", "json")
app = create_app(GatewaySettings(redis_url=sys.argv[1]))

@app.post("/ask")
async def ask(gateway: ThisGateway) -> str:
    request_id = await gateway.client.enqueue("x", max_tokens=3)
    bind(request_id=request_id)
    await gateway.client.result(request_id)
    return request_id

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

Server(uvicorn.Config(app, port=0, log_config=None)).run()
"""

Lines = list[dict[str, Any]]


@contextmanager
def running(*command: str) -> Iterator[tuple[str, Lines]]:
    """A process and the first line it prints; afterwards the lines of its log."""
    lines: Lines = []
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), lines
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate()
        lines += [json.loads(line) for line in log.splitlines()]


def about(lines: Lines, request_id: str) -> Lines:
    """Those that mention the request anywhere."""
    return [line for line in lines if request_id in json.dumps(line)]


def test_a_request_has_one_id_in_all_logs(redis_url: str) -> None:
    url = as_role("worker", redis_url)
    worker = ["-m", "worker", "--model", "model-free", "--redis", url, "--log-level", "debug"]
    with running(*worker) as (_, of_worker), Client(redis_url) as client:
        with running("-c", GATEWAY, redis_url) as (port, of_gateway):
            url = f"http://127.0.0.1:{port}"
            asked = httpx2.post(f"{url}/ask?key=secret").json()
            httpx2.get(f"{url}/healthz")
            httpx2.get(f"{url}/nothing")
        refused = client.enqueue("x", model="another")
        client.result(refused, check=False)
        cancelled = client.enqueue("x", max_tokens=7000)
        next(iter(client.stream(cancelled)))
        client.cancel(cancelled)
        client.result(cancelled)
    for request_id in (asked, refused, cancelled):
        lines = about(of_worker, request_id)
        assert {line["request_id"] for line in lines} == {request_id}
        assert {"claimed", "ended"} <= {line["event"] for line in lines}
    reasons = [
        [line["reason"] for line in about(of_worker, it) if line["event"] == "ended"]
        for it in (asked, refused, cancelled)
    ]
    assert reasons == [["length"], ["error"], ["cancelled"]]
    assert {line["level"] for line in of_worker} <= {"debug", "info", "warning"}
    assert all(line["timestamp"].endswith("Z") for line in [*of_worker, *of_gateway])

    answered = [line for line in of_gateway if line["event"] == "answered" and "ms" in line]
    assert [(line["path"], line["status"]) for line in answered] == [
        ("/ask", 200),
        ("/nothing", 404),
    ]
    assert answered[0]["request_id"] == asked
    assert "request_id" not in answered[1]
    access = [line for line in of_gateway if line.get("logger") == "uvicorn.access"]
    assert (access[0]["method"], access[0]["path"], access[0]["status"]) == ("POST", "/ask", 200)
    assert access[0]["request_id"] == asked
    assert "secret" not in json.dumps(of_gateway)
    assert any(line.get("logger") == "uvicorn.error" for line in of_gateway)


def test_a_traceback_is_one_line_too() -> None:
    script = """
from shared.logs import configure_logs, get_logger
import logging
configure_logs("info", "json")
try:
    1 / 0
except ZeroDivisionError:
    get_logger().exception("ours", request_id="r1")
    logging.getLogger("library").exception("%s of a library", "one")
logging.getLogger("library").info("not shown")
"""
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    ours, theirs = (json.loads(line) for line in outcome.stderr.splitlines())
    assert (ours["event"], ours["request_id"], ours["level"]) == ("ours", "r1", "error")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == (
        "one of a library",
        "library",
        "error",
    )
    assert "ZeroDivisionError" in ours["exception"]
    assert "ZeroDivisionError" in theirs["exception"]


def test_lines_go_to_standard_error_as_it_is_then() -> None:
    """Whoever replaces it, as a test runner does, closes the old one."""
    script = """
from shared.logs import configure_logs, get_logger
import io, logging, sys
first = sys.stderr = io.StringIO()
configure_logs("info", "json")
early = get_logger()
second = sys.stderr = io.StringIO()
first.close()
early.info("ours")
logging.getLogger("library").warning("theirs")
print(second.getvalue(), end="")
"""
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert outcome.stderr == ""
    assert [json.loads(line)["event"] for line in outcome.stdout.splitlines()] == ["ours", "theirs"]
