"""Bodies that clients compress, and bodies that begin with a byte order mark."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import httpx2
import pytest
from backports import zstd

from promptq.producer.calls.errors import ApiError
from promptq.producer.http.content_codings import decoded
from tests.producer.gateway.living import LiveGateway, error_of

MESSAGES = [{"role": "user", "content": "Hi"}]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "temperature": 9}, "temperature"),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 9}, "temperature"),
    ("/v1/responses", {"input": "a", "temperature": 9}, "temperature"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/batches", {"input_file_id": "x"}, "endpoint"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/v1/streams/cmpl-x/fork", {"at": -1}, "at"),
]
"""Calls with a field that is wrong, which shows that all of the body was read."""


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": lambda it: gzip.compress(it[:9]) + gzip.compress(it[9:]),
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstd.compress,
    "ZSTD , identity": lambda it: zstd.compress(it[:9]) + zstd.compress(it[9:]),
    "deflate, gzip": lambda it: gzip.compress(zlib.compress(it)),
    "identity": lambda it: it,
}


@pytest.fixture
def strict(start_gateway: Callable[..., LiveGateway]) -> Iterator[httpx2.Client]:
    """A gateway that takes small bodies only."""
    url = start_gateway(http_max_body_bytes=1000).url
    with httpx2.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.mark.parametrize(("path", "body", "field"), WRONG)
def test_bodies_are_decoded(
    http: httpx2.Client, path: str, body: dict[str, Any], field: str
) -> None:
    for coding, coded in CODINGS.items():
        content = coded(json.dumps(body).encode())
        answer = http.post(path, content=content, headers={"Content-Encoding": coding})
        told = answer.json()["error"]
        assert (answer.status_code, told["param"]) == (400, field), (coding, told)


def test_an_uploaded_form_is_decoded(letters_gateway: LiveGateway) -> None:
    content = random.Random(3).randbytes(200_000)
    with httpx2.Client(base_url=letters_gateway.url, timeout=30) as http:
        fields: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
        form = http.build_request("POST", "/v1/files", **fields)
        for coding, coded in CODINGS.items():
            headers = {"Content-Encoding": coding, "Content-Type": form.headers["Content-Type"]}
            stored = http.post("/v1/files", content=coded(form.read()), headers=headers).json()
            assert stored["bytes"] == len(content), (coding, stored)
            assert http.get(f"/v1/files/{stored['id']}/content").content == content


def test_a_body_that_becomes_too_large(strict: httpx2.Client) -> None:
    """Also where it is small on its way."""
    for coding, coded in CODINGS.items():
        large = coded(json.dumps({"prompt": "a" * 1000}).encode())
        headers = {"Content-Encoding": coding}
        answer = strict.post("/v1/completions", content=large, headers=headers)
        assert error_of(answer) == (413, "body_too_large"), coding


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files", "/v1/batches"])
def test_another_coding_is_refused(http: httpx2.Client, path: str) -> None:
    for coding in ("br", "compress", "gzip, br", "x", "gzip" + ",gzip" * 4, "utf-8"):
        headers = {"Content-Encoding": coding, "Content-Type": "multipart/form-data; boundary=b"}
        answer = http.post(path, content=b"{}", headers=headers)
        assert error_of(answer) == (415, "unsupported_encoding"), coding
        assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_a_body_that_is_not_so_coded(http: httpx2.Client, coding: str) -> None:
    whole = CODINGS[coding](b'{"prompt": "a", "temperature": 9}')
    for content in (b"{}", whole[:-3], whole + b"x", b"x" + whole):
        headers = {"Content-Encoding": coding}
        answer = http.post("/v1/completions", content=content, headers=headers)
        told = answer.json()["error"]
        assert (answer.status_code, told["param"]) == (400, "Content-Encoding"), content


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_comes_in_small_pieces(coding: str) -> None:
    """So whoever counts them stops it."""
    sizes: list[int] = []
    async with aclosing(decoded(_alone(CODINGS[coding](bytes(64 << 20))), coding)) as pieces:
        while sum(sizes) < 1 << 20:
            sizes.append(len(await anext(pieces)))
    assert max(sizes) <= 1 << 16


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_parts_that_bring_nothing_are_few(coding: str) -> None:
    with pytest.raises(ApiError, match="too many small parts"):
        await anext(decoded(_alone(CODINGS[coding](b"") * 1000), coding))


async def _alone(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.mark.parametrize(("path", "body", "field"), WRONG)
def test_a_byte_order_mark(
    http: httpx2.Client, path: str, body: dict[str, Any], field: str
) -> None:
    """That of UTF-8 is taken. JSON in UTF-16 is refused as what it is."""
    text = json.dumps(body)
    answer = http.post(path, content=text.encode("utf-8-sig"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        answer = http.post(path, content=text.encode(encoding))
        assert answer.status_code == 400
        assert f"it is {encoding}" in answer.json()["error"]["message"]
