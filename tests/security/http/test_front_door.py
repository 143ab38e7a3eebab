"""A caller without a key costs nothing, and one with a key takes no more than a share. Tests use
raw sockets.
"""

from __future__ import annotations

import json
import re
import select
import socket
import tracemalloc
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from redis import Redis

from promptq.producer.gateway import app
from promptq.producer.http import connection_limits
from promptq.shared.protocol.keys import Keys
from tests.producer.gateway.living import LiveGateway, bearer, connected, live_gateway, make_key
from tests.support.waiting import until

MIB = 1 << 20
GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


def head(path: str, secret: str, num_bytes: int) -> bytes:
    key = f"Authorization: Bearer {secret}\r\n" if secret else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Type: application/json\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """The next answer: its head and its body."""
    with connection.makefile("rb") as incoming:
        start = b"".join(iter(incoming.readline, b"\r\n"))
        length = re.search(rb"(?i)content-length: (\d+)", start)
        assert length is not None
        return start, incoming.read(int(length[1]))


def is_served(gateway: LiveGateway, secret: str) -> bool:
    headers = bearer(secret)
    body = {"prompt": "Hi", "n": 0}  # which is refused, once all of it was read
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=30) as http:
        answer = http.post("/v1/completions", json=body)
    return answer.status_code == 400 and "n:" in answer.text


def assert_hangs_up(connection: socket.socket, piece: bytes, num_read: int = 65536) -> None:
    """Sends one piece after the other, slowly, until the gateway hangs up."""
    connection.settimeout(0.02)
    for _ in range(1000):
        try:
            connection.sendall(piece)
            if not num_read:
                select.select([], [], [], 0.02)
            elif connection.recv(num_read) == b"":
                return
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return
    raise AssertionError("the gateway never hung up")


def paths_with_bodies(gateway: LiveGateway) -> list[str]:
    document = httpx2.get(f"{gateway.url}/openapi.json", timeout=None).json()
    found = [
        re.sub(r"{\w+}", "x", path)
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if "requestBody" in operation
    ]
    assert len(found) >= 4
    actions = ("cancel", "reprioritise", "drain", "dead/requeue", "dead/purge", "play")
    return [*found, *(f"/dashboard/api/{action}" for action in actions)]


def test_without_a_key_the_answer_comes_before_the_body(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every route that reads one; and the connection goes on behind what is dropped."""
    monkeypatch.setattr(connection_limits, "_DROPPED_BYTES_A_SECOND", 1 << 40)
    make_key(redis_url, "web")
    with live_gateway(redis_url) as gateway:
        for path in paths_with_bodies(gateway):
            with connected(gateway) as connection:
                connection.sendall(head(path, "pq-wrong", 8 * MIB))
                assert answer_of(connection)[0].startswith(b"HTTP/1.1 401 "), path
                connection.sendall(b"x" * 8 * MIB + GET % b"/healthz")
                assert answer_of(connection)[1] == b'{"status":"ok"}', path


def test_without_a_key_no_body_is_kept(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "_DROPPED_BYTES_A_SECOND", 1 << 40)
    make_key(redis_url, "web")
    with live_gateway(redis_url) as gateway, ExitStack() as stack:
        crowd = [stack.enter_context(connected(gateway)) for _ in range(48)]
        tracemalloc.start()
        try:
            for connection in crowd:
                connection.sendall(head("/v1/batches", "", 8 * MIB))
                connection.sendall(b"x" * (8 * MIB - 1))
            for connection in crowd:
                assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 60 * MIB, "of 384 MiB; 8 are those of this test"


@pytest.mark.parametrize(
    ("sent", "piece"),
    [
        (b"", b"G"),
        (b"GET / HTTP/1.1\r\nX-Slow: ", b"x"),
        (b"KEY", b"x"),
        (b"", b"\r\n"),
    ],
    ids=["a method", "a header", "a body", "empty lines"],
)
def test_one_byte_now_and_then_keeps_no_connection(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, sent: bytes, piece: bytes
) -> None:
    secret = make_key(redis_url, "web")
    if sent == b"KEY":
        sent = head("/v1/completions", secret, MIB)
    with live_gateway(redis_url) as gateway:
        with monkeypatch.context() as patch, ExitStack() as stack:
            for name in ("_CHECK_SECONDS", "_SILENCE_SECONDS", "_HEAD_SECONDS"):
                patch.setattr(connection_limits, name, 0.3)
            connection = stack.enter_context(connected(gateway))
            connection.sendall(sent)
            assert_hangs_up(connection, piece)
        assert is_served(gateway, secret)


def test_who_was_refused_may_not_send_for_ever(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "_DROP_SECONDS", 0.3)
    monkeypatch.setattr(connection_limits, "_CHECK_SECONDS", 0.05)
    make_key(redis_url, "web")
    with live_gateway(redis_url) as gateway, connected(gateway) as connection:
        connection.sendall(head("/v1/completions", "", 100 * MIB))
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        assert_hangs_up(connection, b"x")


def test_an_answer_that_nobody_reads_keeps_no_connection(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "_UNREAD_SECONDS", 0.3)
    monkeypatch.setattr(connection_limits, "_CHECK_SECONDS", 0.05)
    with live_gateway(redis_url, files_dir=tmp_path) as gateway, connected(gateway) as connection:
        form = {"files": {"file": b"x" * 20 * MIB}, "data": {"purpose": "batch"}}
        file_id = httpx2.post(f"{gateway.url}/v1/files", **form, timeout=30).json()["id"]
        connection.sendall(GET % f"/v1/files/{file_id}/content".encode())
        assert_hangs_up(connection, b"\r\n", num_read=0)


def test_requests_sent_far_ahead_end_the_connection(redis_url: str) -> None:
    """Each that waits behind another takes memory, whoever sent it."""
    with live_gateway(redis_url) as gateway, connected(gateway) as connection:
        ahead = GET % b"/openapi.json" * 1000
        assert_hangs_up(connection, ahead, num_read=1)


CHAT, FILES = "/v1/chat/completions", "/v1/files"
FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'


@pytest.mark.parametrize("has_key", [True, False])
def test_a_body_in_tiny_pieces_ends_the_connection(redis_url: str, has_key: bool) -> None:
    """Each costs as much as a large one would."""
    secret = make_key(redis_url, "web") if has_key else "pq-wrong"
    chunked = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    with live_gateway(redis_url) as gateway, connected(gateway) as connection:
        connection.sendall(chunked.encode())
        assert_hangs_up(connection, b"1\r\nx\r\n" * 100)
        assert is_served(gateway, make_key(redis_url, "other"))


def stalled(gateway: LiveGateway, path: str, secret: str) -> socket.socket:
    """A connection on which all of a body has come but its last byte."""
    parts = urlsplit(gateway.url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    start, body = head(path, secret, MIB), b" " * (MIB - 1)
    if path == FILES:
        start = start.replace(b"application/json", b"multipart/form-data; boundary=b")
        body = FORM + body[len(FORM) :]
    with suppress(ConnectionError):  # it may be refused before all is sent
        connection.sendall(start + body)
    return connection


def code_of(gateway: LiveGateway, path: str, secret: str) -> tuple[int, str]:
    """Returns the error code for a body half as large whose end is malformed."""
    headers = bearer(secret)
    kind = "multipart/form-data; boundary=b" if path == FILES else "application/json"
    body = FORM + b" " * (MIB // 2)
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=30) as http:
        answer = http.post(path, content=body, headers={"Content-Type": kind})
    return answer.status_code, answer.json()["error"]["code"]


def stall_until(
    gateway: LiveGateway, path: str, secrets: list[str], code: tuple[int, str], stack: ExitStack
) -> None:
    """Have a body of each key stand until a call of the first one gets this code.

    A body that comes at the same moment as that call may be refused in its place. It is sent again.
    """
    standing: dict[str, socket.socket] = {}

    def is_full() -> bool:
        for secret in secrets:
            if secret not in standing or select.select([standing[secret]], [], [], 0)[0]:
                standing[secret] = stack.enter_context(stalled(gateway, path, secret))
        return code_of(gateway, path, secrets[0]) == code

    until(is_full)


def test_bodies_count_by_tenant_and_small_ones_always_get_in(redis_url: str) -> None:
    """Bytes that have come count; once their connections are gone, there is room again."""
    greedy = [make_key(redis_url, f"greedy-{number}", tenant="greedy") for number in range(2)]
    limits = {"http_max_body_bytes": MIB, "http_body_bytes_per_tenant": 2 * MIB}
    with live_gateway(redis_url, **limits) as gateway:
        with ExitStack() as stack:
            stall_until(gateway, CHAT, greedy, (429, "bodies_of_tenant"), stack)
            assert is_served(gateway, greedy[0])
        until(lambda: code_of(gateway, CHAT, greedy[0]) == (400, "invalid_request"))


@pytest.mark.parametrize("path", [CHAT, FILES])
def test_many_keys_of_one_tenant_leave_room_for_another(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """While all its bodies stand: a large call of another tenant, and any small one."""
    monkeypatch.setattr(app, "MAX_FILE_BYTES", MIB // 4)
    monkeypatch.setattr(app, "_UPLOADS_OF_TENANT", 16)
    limits: dict[str, Any] = {"http_max_body_bytes": MIB, "http_body_bytes": 4 * MIB}
    greedy = [make_key(redis_url, f"greedy-{number}", tenant="greedy") for number in range(4)]
    other = make_key(redis_url, "other")
    with live_gateway(redis_url, files_dir=tmp_path, **limits) as gateway, ExitStack() as stack:
        stall_until(gateway, path, greedy[:2], (503, "bodies"), stack)
        for secret in greedy[2:] * 2:
            beyond = stack.enter_context(stalled(gateway, path, secret))
            assert answer_of(beyond)[0].startswith(b"HTTP/1.1 503 ")
        assert code_of(gateway, path, other) == (400, "invalid_request")
        assert is_served(gateway, other)
        assert is_served(gateway, greedy[0])


def test_a_large_body_may_not_save_up_time_for_silence(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that sent much at first is disconnected as soon as one that sent little."""
    monkeypatch.setattr(connection_limits, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(connection_limits, "_SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(connection_limits, "_WINDOW_SECONDS", 0.3)
    secret = make_key(redis_url, "web")
    with live_gateway(redis_url) as gateway, stalled(gateway, CHAT, secret) as connection:
        with connected(gateway) as little:
            little.sendall(head(CHAT, secret, MIB) + b" ")
            ready, _, _ = select.select([connection, little], [], [], 30)
        assert connection in ready
        assert connection.recv(1) == b""


def test_what_a_call_becomes_counts_too(redis_url: str) -> None:
    """A small body with a large `n` holds as many bytes as its requests have."""
    secret = make_key(redis_url, "web")
    limits = {"http_max_body_bytes": MIB, "http_body_bytes_per_tenant": MIB}
    body = {"prompt": "x" * 50_000, "n": 64, "wait_for_worker": False}
    with live_gateway(redis_url, **limits) as gateway:
        headers = bearer(secret)
        with httpx2.Client(base_url=gateway.url, headers=headers, timeout=30) as http:
            refused = http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "bodies_of_tenant",
            )
            let_in = http.post("/v1/completions", json={**body, "n": 2})
            assert let_in.json()["error"]["code"] == "no_worker"


WAITING = Keys().pending_of("web")


def is_waiting_or_answered(server: Redis, number: int, connection: socket.socket) -> bool:
    return server.zcard(WAITING) == number or bool(select.select([connection], [], [], 0)[0])


def test_a_call_that_waits_in_the_queue_holds_no_bytes(redis_url: str) -> None:
    """Each call needs more than half of its tenant's bytes, until it is in the queue."""
    secret = make_key(redis_url, "web")
    limits = {"http_max_body_bytes": MIB // 4, "http_body_bytes_per_tenant": MIB // 4}
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (MIB // 5)}]}).encode()
    with (
        Redis.from_url(redis_url) as server,
        live_gateway(redis_url, **limits) as gateway,
        ExitStack() as stack,
    ):
        for number in (1, 2):
            connection = stack.enter_context(connected(gateway))
            connection.sendall(head(CHAT, secret, len(body)) + body)
            until(partial(is_waiting_or_answered, server, number, connection))
            assert server.zcard(WAITING) == number


def test_connections_are_bounded_and_probes_still_answered(redis_url: str) -> None:
    with live_gateway(redis_url, http_max_connections=4) as gateway, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(gateway))
        refused = httpx2.get(f"{gateway.url}/v1/models", timeout=None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "connections")
        assert refused.headers["retry-after"] == "1"
        assert httpx2.get(f"{gateway.url}/healthz", timeout=None).status_code == 200
        stack.close()
        until(lambda: httpx2.get(f"{gateway.url}/v1/models", timeout=None).status_code == 200)
        with ExitStack() as crowd:
            for _ in range(100):
                connection = crowd.enter_context(connected(gateway))
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "there are more than probes need"
