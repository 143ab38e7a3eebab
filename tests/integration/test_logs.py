"""One request_id from the gateway to the worker, in every line about a request."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from promptq import Client
from tests.support.processes import read_line, running
from tests.support.roles import as_role

GATEWAY = """
import sys
import uvicorn
from promptq.producer.gateway.app import create_app
from promptq.producer.settings.gateway import GatewaySettings
from promptq.shared.runtime.logs import configure_logs

configure_logs("info", "json")
app = create_app(GatewaySettings(redis_url=sys.argv[1]))

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

Server(uvicorn.Config(app, port=0, log_config=None)).run()
"""

Lines = list[dict[str, Any]]
MODELS = "/v1/models"


@contextmanager
def logging(*command: str) -> Iterator[tuple[str, Lines]]:
    """A process and the first line it prints; afterwards the lines of its log."""
    lines: Lines = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(sys.executable, *command, **pipes, text=True) as process:
        try:
            yield read_line(process).strip(), lines
        finally:
            process.terminate()
            _, log = process.communicate()
            lines += [json.loads(line) for line in log.splitlines()]


def worker_of(url: str) -> list[str]:
    worker = ["-m", "promptq.worker", "--model", "model-free", "--log-level", "debug"]
    return [*worker, "--redis", as_role("worker", url)]


def about(lines: Lines, request_id: str) -> Lines:
    """Returns the log lines that mention the request anywhere."""
    return [line for line in lines if request_id in json.dumps(line)]


def test_a_request_has_one_id_in_all_logs(redis_url: str) -> None:
    with logging(*worker_of(redis_url)) as (_, of_worker), Client(redis_url) as client:
        with logging("-c", GATEWAY, as_role("gateway", redis_url)) as (port, of_gateway):
            url = f"http://127.0.0.1:{port}"
            body = {"prompt": "x", "max_tokens": 3}
            asked = httpx2.post(f"{url}/v1/completions?key=secret", json=body, timeout=None).json()[
                "id"
            ]
            httpx2.get(f"{url}/healthz", timeout=None)
            httpx2.get(f"{url}/nothing", timeout=None)
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
        ("/v1/completions", 200),
        ("/nothing", 404),
    ]
    assert answered[0]["request_id"] == asked
    assert "request_id" not in answered[1]
    access = [line for line in of_gateway if line.get("logger") == "uvicorn.access"]
    first = access[0]
    assert (first["method"], first["path"]) == ("POST", "/v1/completions")
    assert (first["status"], first["request_id"]) == (200, asked)
    assert "secret" not in json.dumps(of_gateway)
    assert any(line.get("logger") == "uvicorn.error" for line in of_gateway)


def test_every_call_about_an_answer_is_logged_with_its_id(redis_url: str) -> None:
    """Asked for, gone on with, read again, cancelled; workers add a number to each of several.

    A call behind another on its connection does not take over the other's.
    """
    gateway = ["-m", "promptq.producer.cli", "gateway", "--port", "0"]
    gateway += ["--redis", as_role("gateway", redis_url)]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    unknown = "/v1/streams/chatcmpl-0197d3c2-7e6b-7f7c-9d2a-8f1e5b7c4a10"
    with logging(*worker_of(redis_url)) as (_, of_worker), logging(*gateway) as (ready, of_gateway):
        base = ready.split()[2].rstrip(",")
        with httpx2.Client(base_url=base, timeout=None) as http:
            asked = http.post("/v1/chat/completions", json=body)
            event_id = asked.text.split("\n")[0].removeprefix("id: ")
            headers = {"Last-Event-ID": event_id}
            assert http.post("/v1/chat/completions", json=body, headers=headers).is_success
            for request in ("GET", "DELETE"):
                assert http.request(request, asked.headers["X-Stream-Url"]).is_success
            several = http.post("/v1/completions", json={"prompt": "x", "n": 2}).json()["id"]
        with socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2]))) as pipelined:
            heads = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n" for path in (unknown, MODELS)]
            pipelined.sendall(f"{heads[0]}\r\n{heads[1]}Connection: close\r\n\r\n".encode())
            while pipelined.recv(65536):
                pass
    one = asked.headers["X-Request-Id"]
    answered = [(line["method"], line["path"], line.get("request_id")) for line in of_gateway]
    assert answered == [
        ("POST", "/v1/chat/completions", one),
        ("POST", "/v1/chat/completions", one),
        ("GET", f"/v1/streams/{one}", one),
        ("DELETE", f"/v1/streams/{one}", one),
        ("POST", "/v1/completions", several),
        ("GET", unknown, unknown.rpartition("/")[2]),
        ("GET", MODELS, None),
    ]
    ended = {line["request_id"] for line in of_worker if line["event"] == "ended"}
    assert ended == {one, f"{several}:0", f"{several}:1"}


def test_a_traceback_is_one_line_too() -> None:
    script = """
from promptq.shared.runtime.logs import configure_logs, get_logger
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
from promptq.shared.runtime.logs import configure_logs, get_logger
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


def test_a_worker_says_that_another_has_another_length(redis_url: str) -> None:
    """A stream may go on at any of them."""
    worker = [*worker_of(redis_url), "--max-model-len"]
    with (
        logging(*worker, "600") as (_, of_first),
        logging(*worker, "600") as (_, of_second),
        logging(*worker, "500") as (_, of_third),
        Client(redis_url) as client,
    ):
        told = {it.worker_id: it.max_model_len for it in client.stats().workers}
        assert sorted(told.values()) == [500, 600, 600]
    assert of_first == of_second == []
    (line,) = of_third
    assert (line["level"], line["max_model_len"], line["other_max_model_len"]) == (
        "warning",
        500,
        600,
    )
    assert "--max-model-len" in line["event"]
    assert (told[line["worker_id"]], told[line["other_worker_id"]]) == (500, 600)
