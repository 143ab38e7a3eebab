"""Reads the body of an HTTP request, but never more than is allowed.

A body that is not read, such as that of a caller without a key, is dropped in protocol.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import Request

from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import ApiError


class TooLargeError(ApiError):
    """Status 413, which is sent at once."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(
            413,
            f"the {what} is larger than the {most} bytes that are allowed",
            param=None if what == "body" else what,
            code=f"{what}_too_large",
        )


async def read_body(request: Request, most: int, hold: Hold) -> bytes:
    """The body, up to `most` bytes. Raises as `body_pieces`."""
    return b"".join([piece async for piece in body_pieces(request, most, hold)])


async def body_pieces(
    request: Request, most: int, hold: Hold, *, most_beside: int = 0, what: str = "body"
) -> AsyncGenerator[bytes, None]:
    """The pieces of a body as they come: at most `most` bytes for `what`, and `most_beside` more.

    Raises TooLargeError as soon as there are more bytes, and what `hold` raises.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most + most_beside:
        raise TooLargeError(what, most)
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most + most_beside:
            raise TooLargeError(what, most)
        hold.add(len(piece))
        yield piece
