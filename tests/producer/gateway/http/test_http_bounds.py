"""Bounds on the memory that a client can make a gateway keep, on raw sockets."""

from __future__ import annotations

import json
import re
import socket
import tracemalloc
from collections.abc import Callable

import httpx2
import pytest

from promptq.producer.http import connection_limits
from promptq.producer.http.connection_limits import MAX_HEAD_BYTES
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import FinishReason, RequestState
from promptq.shared.protocol.rows import Row
from tests.producer.gateway.living import LiveGateway, connected, live_gateway, sent_until_cut
from tests.producer.playing import HandWorker

LINE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def all_of(connection: socket.socket) -> bytes:
    """Returns all bytes until the gateway closes."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass  # it did not read what was sent last
    return b"".join(pieces)


@pytest.mark.parametrize("keeps", [b"", b"Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(
    gateway: LiveGateway, own_worker: HandWorker, keeps: bytes
) -> None:
    """The end of the connection ends what has no length, as a stream has not."""
    body = json.dumps({"prompt": "Hi", "stream": True, "detach": True}).encode()
    asked = b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
    with connected(gateway) as connection, own_worker.finishing(["abc"]):
        connection.sendall(asked % (keeps, len(body)) + body)
        head, _, stream = all_of(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert {line[:4] for line in stream.split(b"\n") if line} == {b"id: ", b"data"}
    assert stream.endswith(b"data: [DONE]\n\n")
    url = re.search(b"x-stream-url: (.*)", head.lower())
    assert url is not None
    for method, path in ((b"GET", url[1].strip()), (b"GET", b"/healthz"), (b"HEAD", b"/readyz")):
        with connected(gateway) as connection:
            connection.sendall(
                b"%s %s HTTP/1.0\r\nHost: localhost\r\n%s\r\n" % (method, path, keeps)
            )
            again, _, rest = all_of(connection).partition(b"\r\n\r\n")
        assert again.startswith(b"HTTP/1.1 ")
        assert b"transfer-encoding" not in again.lower()
        rest = rest.removeprefix(b": waiting\n")
        assert rest == {b"/healthz": b'{"status":"ok"}', b"/readyz": b""}.get(path, stream)


def test_a_client_of_http_1_0_gets_no_interim_answer(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """Such a client would take `100 Continue` for the answer."""
    body = b'{"prompt": "Hi"}'
    head = b"POST /v1/completions HTTP/1.%d\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    begins = []
    for minor in (0, 1):
        with connected(gateway) as connection, own_worker.finishing(["abc"]):
            connection.sendall(head % (minor, len(body)) + body)
            begins.append(all_of(connection)[:21])
    assert begins == [b"HTTP/1.1 200 OK\r\ndate", b"HTTP/1.1 100 Continue"]


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (LINE, lambda number: b"X-%d: %s\r\n" % (number, b"x" * 1000)),
        (LINE + b"X-Long: ", lambda _: b"x" * 1000),
        (b"GET /", lambda _: b"x" * 1000),
        (CHUNKED + b"0\r\n", lambda number: b"X-%d: %s\r\n" % (number, b"x" * 1000)),
    ],
    ids=["headers", "a header", "a path", "trailers"],
)
def test_a_head_without_end(
    gateway: LiveGateway, begin: bytes, more: Callable[[int], bytes]
) -> None:
    """The connection is closed when it is too large, before anybody asks for a key."""
    with connected(gateway) as connection:
        connection.sendall(begin)
        sent = sent_until_cut(connection, map(more, range(1_000_000)))
        assert MAX_HEAD_BYTES / 2 < sent < 100_000_000, "socket buffers take a few megabytes"
        all_of(connection)


def test_a_trailer_is_no_header(gateway: LiveGateway) -> None:
    """And large heads that end, and requests that follow on the connection, are answered."""
    posted = (
        CHUNKED.replace(b"models", b"completions") + b"2\r\n{}\r\n0\r\nX-Priority: soon\r\n\r\n"
    )
    large = LINE + b"X-Large: " + b"x" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n"
    with connected(gateway) as connection:
        connection.sendall(posted + large + LINE + b"Connection: close\r\n\r\n")
        answers = all_of(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b"prompt: " in answers
    assert b"X-Priority" not in answers


@pytest.mark.parametrize(
    "sent",
    [b"", LINE, CHUNKED + b"5\r\nab", LINE + b"\r\n\r\n"],
    ids=["nothing", "half a head", "half a body", "a line behind a request"],
)
def test_a_client_that_sends_no_more(
    start_gateway: Callable[..., LiveGateway],
    own_worker: HandWorker,
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
) -> None:
    """Its connection is closed in the end; that of a client that waits for an answer is not."""
    monkeypatch.setattr(connection_limits, "_CHECK_SECONDS", 0.1)
    gateway = start_gateway()
    asked = b'{"prompt":"Hi"}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with connected(gateway) as waiting, connected(gateway) as silent:
        waiting.sendall(post % len(asked) + asked)
        claim = own_worker.take_next()
        silent.sendall(sent)
        monkeypatch.setattr(connection_limits, "_SILENCE_SECONDS", 0.1)
        monkeypatch.setattr(connection_limits, "_HEAD_SECONDS", 0.1)
        all_of(silent)
        own_worker.finish(claim, "a")
        assert b'"text":"a"' in all_of(waiting)


def test_a_client_that_leaves_while_it_sends(
    redis_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gateway counts a client that left, and no failure."""
    with live_gateway(redis_url) as gateway:
        with connected(gateway) as connection:
            connection.sendall(CHUNKED.replace(b"models", b"completions") + b"5\r\nab")
        counted = b'handler="/v1/completions",method="POST",status="499"'
        with httpx2.Client(base_url=gateway.url, timeout=None) as http:
            while counted not in http.get("/metrics").content:
                pass
    # The gateway's thread has ended: Python 3.11.2 crashes if it writes while its output is read.
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_leaves_with_a_request_behind_its_stream(
    gateway: LiveGateway, own_worker: HandWorker
) -> None:
    """Its stream is cancelled as any other."""
    asked = b'{"prompt":"Hi","stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with connected(gateway) as connection:
        connection.sendall(head % len(asked) + asked + LINE + b"\r\n")
        claim = own_worker.take_next()
        own_worker.send(claim, "a")
        assert connection.recv(100)
    while own_worker.queue.state(claim.request_id) is RequestState.ACTIVE:
        own_worker.send(claim, "a")
    assert own_worker.queue.state(claim.request_id) is RequestState.CANCELLED


def test_a_client_that_does_not_read(gateway: LiveGateway, own_worker: HandWorker) -> None:
    """Of several answers little is kept beyond what a client takes, and nothing of them is lost."""
    num, text = 1000, "a" * 8000
    asked = json.dumps({"prompt": "Hi", "stream": True, "n": 2, "max_tokens": num}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with connected(gateway) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(asked), asked))
        claims = [it for _ in range(2) if (it := own_worker.queue.take()) is not None]
        tracemalloc.start()
        try:
            for index in range(num):
                reason = FinishReason.STOP if index == num - 1 else None
                event = TokenEvent(index=index, token_ids=[1], text=text, finish_reason=reason)
                rows = [Row.of(claim.request_id, claim.fence, event) for claim in claims]
                own_worker.queue.publish(rows)
            assert tracemalloc.get_traced_memory()[0] < num * len(text), "of twice as much"
        finally:
            tracemalloc.stop()
        answer = all_of(connection)
    chunks = [json.loads(line) for line in re.findall(rb"^data: (\{.*)$", answer, re.MULTILINE)]
    for place in range(2):
        texts = [it["text"] for chunk in chunks for it in chunk["choices"] if it["index"] == place]
        assert "".join(texts) == text * num
    assert b"data: [DONE]" in answer


@pytest.mark.parametrize("name", ["h2c", "websocket"])
def test_an_offer_to_change_the_protocol_is_ignored(gateway: LiveGateway, name: str) -> None:
    """Java's client makes one with each request. The body and later requests count as without."""
    body, offer = b'{"prompt": 1}', b"Connection: Upgrade\r\nUpgrade: %s\r\n" % name.encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + offer
    whole = post + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    last = whole.replace(b"Connection: ", b"Connection: close, ")
    sent = LINE + offer + b"\r\n" + (whole + chunked) * 3 + LINE + b"\r\n" + last
    answers = []
    for pieces in ([sent], [sent[place : place + 1] for place in range(len(sent))]):
        with connected(gateway) as connection:
            for piece in pieces:
                connection.sendall(piece)
            answers.append(all_of(connection))
    for answer in answers:
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.count(b"prompt: ") == answer.count(b"HTTP/1.1 400 ") == 7
