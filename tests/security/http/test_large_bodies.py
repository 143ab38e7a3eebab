"""Bodies that take long to read are read beside the event loop, each key's in its turn."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import redis

from promptq.producer.calls import call_reader
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import RequestQueue, new_request_id
from promptq.shared.queue.scripts import Rate, take_of_rates
from tests.producer.gateway.living import (
    LiveGateway,
    bearer,
    connected,
    live_gateway,
    live_http,
    make_key,
    sent,
)
from tests.support.roles import as_role
from tests.support.waiting import until

MANY = [{"role": "user", "content": ""}] * 60_000
PARTS = [{"type": "text", "text": ""}] * 600
LARGE = json.dumps({"messages": [{"role": "user", "content": PARTS}] * 400}).encode()
LARGE_AND_WRONG = json.dumps({"messages": MANY, "temperature": 9}).encode()


def chat_sent(
    gateway: LiveGateway, secret: str, body: bytes
) -> AbstractContextManager[socket.socket]:
    return sent(gateway, "/v1/chat/completions", body, bearer(secret))


@pytest.fixture
def queue(redis_url: str) -> Iterator[RequestQueue]:
    with redis.Redis.from_url(as_role("", redis_url)) as connection:
        yield RequestQueue(connection)


def test_others_are_answered_while_a_large_body_is_read(
    redis_url: str, queue: RequestQueue
) -> None:
    secret, other = make_key(redis_url, "greedy"), make_key(redis_url, "other")
    headers = bearer(other)
    with (
        live_gateway(redis_url) as gateway,
        httpx2.Client(base_url=gateway.url, headers=headers, timeout=60) as http,
        chat_sent(gateway, secret, LARGE) as connection,
    ):
        refused = http.post("/v1/completions", json={"prompt": "Hi", "temperature": 9})
        assert refused.status_code == 400
        assert queue.is_empty(), "the large one is in the queue before"
        while queue.is_empty():
            refusals, _, _ = select.select([connection], [], [], 0.01)
            assert not refusals, connection.recv(65536)


def helpers() -> dict[int, str]:
    """The processes that this one has started to read bodies, each with its environment.

    Those of gateways that last over several tests are among them.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())
            is_ours = parent is not None and int(parent[1]) == os.getpid()
            if is_ours and b"call_reader_process" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "environ").read_text()
    return found


def kernel_holds_nothing(port: int) -> bool:
    """Whether the two ends of all connections to this port have read what the others have sent."""
    end = f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = [row[4] for row in rows if end in (row[1][-5:], row[2][-5:]) and row[3] == "01"]
    return set(queues) == {"00000000:00000000"}


@pytest.mark.long
def test_many_large_bodies_of_one_key_do_not_keep_anothers_waiting(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that read bodies stand still until the gateway has all bodies."""
    begun: list[str] = []
    ask = call_reader._ask

    async def noting_ask(process: Any, query: Any, parts: Any) -> Any:
        begun.append(query["caller"]["name"])
        return await ask(process, query, parts)

    monkeypatch.setattr(call_reader, "_ask", noting_ask)
    greedy, other = make_key(redis_url, "greedy"), make_key(redis_url, "other")
    others = helpers().keys()
    with live_gateway(redis_url) as gateway, ExitStack() as stack:
        while len(readers := helpers().keys() - others) < 2:
            with (
                chat_sent(gateway, greedy, LARGE_AND_WRONG) as one,
                chat_sent(gateway, other, LARGE_AND_WRONG) as another,
            ):
                for connection in (one, another):
                    assert connection.recv(12).startswith(b"HTTP/1.1 ")
        for pid in readers:
            os.kill(pid, signal.SIGSTOP)
        begun.clear()
        crowd = [stack.enter_context(chat_sent(gateway, greedy, LARGE_AND_WRONG)) for _ in range(8)]
        with chat_sent(gateway, other, LARGE_AND_WRONG) as connection:
            until(lambda: kernel_holds_nothing(urlsplit(gateway.url).port or 0))
            for pid in readers:
                os.kill(pid, signal.SIGCONT)
            for each in (connection, *crowd):
                assert each.recv(12) == b"HTTP/1.1 400"
    # Two bodies are read at once: in the order of arrival, the other one would be the last.
    assert len(begun) == len(crowd) + 1
    assert begun.index("other") <= 1


def test_a_body_that_takes_too_long_fails_alone(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = make_key(redis_url, "greedy")
    headers = bearer(secret)
    with live_http(redis_url, headers) as http:
        with monkeypatch.context() as patch:
            patch.setattr(call_reader, "_MOST_CPU_SECONDS", 0.001)
            refused = http.post("/v1/chat/completions", content=LARGE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "body_too_complex")
        wrong = http.post("/v1/chat/completions", content=LARGE_AND_WRONG)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_was_ended_fails_nobodys_call(redis_url: str, number: int) -> None:
    headers = bearer(make_key(redis_url, "web"))
    others = helpers().keys()
    with live_http(redis_url, headers) as http:
        ended = set()
        for _ in range(3):
            wrong = http.post("/v1/chat/completions", content=LARGE_AND_WRONG)
            assert wrong.json()["error"]["param"] == "temperature"
            [pid] = helpers().keys() - others
            os.kill(pid, number)
            ended.add(pid)
        assert len(ended) == (3 if number == signal.SIGKILL else 1)


def test_a_process_writes_what_it_logs_into_the_gateways_log(
    redis_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And not into the pipe, where it would be read as a part of the answer."""
    headers = bearer(make_key(redis_url, "web"))
    body = json.dumps({"messages": MANY, "user": "a"})
    with live_gateway(redis_url) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        wrong = httpx2.post(url, content=body, headers=headers, timeout=60)
    assert wrong.json()["error"]["param"] == "messages"
    line = json.loads(capfd.readouterr().err)
    assert (line["event"], line["field"]) == ("a field of a call has no effect: user", "user")


def test_where_no_process_starts_or_gets_time_the_call_is_to_come_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = bearer(make_key(redis_url, "web"))
    with live_http(redis_url, headers) as http:
        for name, value in (("sys.executable", "/nowhere"), ("_MOST_SECONDS", 0.0)):
            with monkeypatch.context() as patch:
                patch.setattr(f"{call_reader.__name__}.{name}", value)
                later = http.post("/v1/chat/completions", content=LARGE_AND_WRONG)
            assert (later.status_code, later.json()["error"]["code"]) == (503, "body_not_read")
            assert later.headers["retry-after"] == "5"


def test_the_processes_know_no_password_and_run_no_file_of_the_working_directory(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "structlog.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROMPTQ_REDIS_URL", "redis://x:a-password@localhost")
    headers = bearer(make_key(redis_url, "web"))
    others = helpers().keys()
    with live_gateway(redis_url) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        wrong = httpx2.post(url, content=LARGE_AND_WRONG, headers=headers, timeout=60)
        [pid] = helpers().keys() - others
        environment = helpers()[pid]
    assert wrong.json()["error"]["param"] == "temperature"
    assert not (tmp_path / "ran").exists()
    assert "PROMPTQ" not in environment


def test_an_invalid_body_counts_as_a_call(redis_url: str) -> None:
    secret = make_key(redis_url, "web", requests_per_minute=2)
    headers = bearer(secret)
    with live_http(redis_url, headers) as http:
        answers = [http.post("/v1/completions", content=b"{") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [400, 400, 429]


def test_who_goes_on_with_no_stream_of_theirs_sends_no_body(redis_url: str) -> None:
    """Each try counts as a read."""
    secret = make_key(redis_url, "web", requests_per_minute=2)
    strange = f"cmpl-{new_request_id()}/0-0"
    with live_gateway(redis_url) as gateway:
        for last_event_id, status in (("x", b"400"), (strange, b"404")):
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n"
                f"Authorization: Bearer {secret}\r\nLast-Event-ID: {last_event_id}\r\n\r\n"
            )
            with connected(gateway) as connection:
                connection.sendall(head.encode())
                assert connection.recv(12) == b"HTTP/1.1 " + status


def test_a_client_that_waits_as_long_as_retry_after_says_gets_several_answers(
    redis_url: str, queue: RequestQueue
) -> None:
    """Where the time that it was told to wait has passed, as its bucket tells it."""
    secret = make_key(redis_url, "web", requests_per_minute=6)
    few = make_key(redis_url, "few", requests_per_minute=4)
    queue.run(take_of_rates("web", [Rate("requests", 4, 6)]))
    connection: Any = queue.redis
    headers = {"Authorization": f"Bearer {secret}", "X-Wait-For-Worker": "true"}
    body = {"prompt": "Hi", "n": 5, "stream": True}
    statuses = []
    with live_http(redis_url, headers, http_header_seconds=0) as http:
        for _ in range(2):
            with http.stream("POST", "/v1/completions", json=body) as answer:
                statuses.append(answer.status_code)
                waited_ms = int(answer.headers.get("retry-after-ms", 0))
                connection.hincrbyfloat(f"{Keys().prefix}rate:web", "requests", -waited_ms)
        headers["Authorization"] = f"Bearer {few}"
        never = http.post("/v1/completions", json=body, headers=headers)
    assert statuses == [429, 200]
    assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in never.headers


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "Grüße 🎉", "seed": 7, "echo": True, "n": 2}),
        ("completions", {"prompt": [[1, 2], "x"], "logprobs": 1, "idempotency_key": "k"}),
        ("completions", {"prompt": "x", "trace_context": {"traceparent": "00-1-2-01"}}),
        (
            "chat/completions",
            {
                "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "deadline_ms": 100_000,
                "priority": 3,
            },
        ),
    ],
)
def test_what_is_enqueued_does_not_depend_on_where_it_was_read(
    redis_url: str,
    queue: RequestQueue,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
) -> None:
    secret = make_key(redis_url, "web", tenant="shop", tokens_per_minute=100_000)
    headers = {"Authorization": f"Bearer {secret}", "X-Wait-For-Worker": "true"}
    kept: list[list[dict[bytes, bytes]]] = []
    with live_gateway(redis_url, http_header_seconds=0) as gateway:
        for most in (call_reader._SMALL_BYTES, 0):
            monkeypatch.setattr(call_reader, "_SMALL_BYTES", most)
            with (
                httpx2.Client(base_url=gateway.url, headers=headers, timeout=60) as http,
                http.stream("POST", f"/v1/{path}", json={**fields, "stream": True}) as answer,
            ):
                assert answer.status_code == 200
                assert answer.headers["x-ratelimit-limit-tokens"] == "100000"
                ids = queue.run(lookups.waiting_ids(queue.keys, 9))
                connection: Any = queue.redis
                names = ("payload", "tenant", "priority")
                kept.append([connection.hmget(Keys().request(it), names) for it in sorted(ids)])
                kept_url = answer.headers["x-stream-url"].partition("?")[2]
                kept[-1].append(kept_url)
            connection.flushdb()
            secret_again = make_key(redis_url, "web", tenant="shop", tokens_per_minute=100_000)
            headers["Authorization"] = f"Bearer {secret_again}"
    assert kept[0] == kept[1]
