"""Bodies that are larger than they may be: who sends one reads why, and not for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import repeat

import openai
import pytest

from promptq.producer.http import connection_limits
from tests.producer.gateway.living import LiveGateway, connected, sent_until_cut

CHUNKED = b"Transfer-Encoding: chunked"


@pytest.fixture
def strict(start_gateway: Callable[..., LiveGateway]) -> LiveGateway:
    return start_gateway(http_max_body_bytes=1000)


@pytest.mark.parametrize("is_declared", [True, False])
async def test_openai_client_reads_why(strict: LiveGateway, is_declared: bool) -> None:
    """Though it sends all of the body first, and more than sockets hold."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 1_000_000

    url = strict.base_url
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        content = b"x" * 50_000_000 if is_declared else pieces()
        with pytest.raises(openai.APIStatusError) as refused:
            await client.post("/completions", cast_to=object, content=content)
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("path", "length"),
    [
        (b"/v1/completions", CHUNKED),
        (b"/v1/completions", b"Content-Length: 1000000000000"),
        (b"/v1/batches", CHUNKED),
        (b"/dashboard/api/cancel", CHUNKED),
    ],
)
def test_a_body_without_end(
    strict: LiveGateway, monkeypatch: pytest.MonkeyPatch, path: bytes, length: bytes
) -> None:
    """The answer comes at once, and the connection is closed before long."""
    monkeypatch.setattr(connection_limits, "_MOST_DROPPED_BYTES", 1_000_000)
    piece = b"1000\r\n%s\r\n" % (b"x" * 4096)
    with connected(strict) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % (path, length))
        connection.sendall(piece)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
        sent = sent_until_cut(connection, repeat(piece, 250_000))
        assert 500_000 < sent < 100_000_000, "socket buffers take a few megabytes"
