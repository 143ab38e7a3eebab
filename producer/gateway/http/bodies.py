"""Reads the body of an HTTP request, but never more than is allowed.

A body that is not read, such as that of a caller without a key, is dropped in protocol.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.content_codings import codings_of, decoded
from promptq.producer.gateway.http.errors import ApiError

_BOM = b"\xef\xbb\xbf"


class TooLargeError(ApiError):
    """Status 413, which is sent at once."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(
            413,
            f"the {what} is larger than the {most} bytes that are allowed",
            param=None if what == "body" else what,
            code=f"{what}_too_large",
        )


def read_json(body: bytes) -> Any:
    """The value of a body in JSON, with or without a byte order mark. Raises ValueError."""
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise ValueError(f"the body is not JSON: it is {encoding}, and JSON is sent in utf-8")
    try:
        return from_json(body.removeprefix(_BOM), allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None


async def read_body(request: Request, most: int, hold: Hold) -> bytes:
    """The body, up to `most` bytes. Raises as `body_pieces`."""
    return b"".join([piece async for piece in body_pieces(request, most, hold)])


async def body_pieces(
    request: Request, most: int, hold: Hold, *, most_beside: int = 0, what: str = "body"
) -> AsyncGenerator[bytes, None]:
    """The decoded pieces of a body as they come: at most `most` bytes for `what`, and
    `most_beside` more.

    Raises TooLargeError as soon as there are more bytes, ApiError 400 and 415 for a body that
    cannot be decoded, and what `hold` raises.
    """
    codings = codings_of(request.headers.getlist("content-encoding"))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most + most_beside:
        raise TooLargeError(what, most)

    async def bounded(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > most + most_beside:
                raise TooLargeError(what, most)
            yield piece

    pieces = bounded(request.stream())
    for coding in codings:
        pieces = bounded(decoded(pieces, coding))
    async for piece in pieces:
        hold.add(len(piece))
        yield piece
