"""Reads the body of an HTTP request, no more of it than is allowed.

What is not read, as of somebody without a key, is dropped by the protocol (protocol.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import Request

from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import ApiError


class TooLargeError(ApiError):
    """413. Its answer goes out at once."""

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
    """The body as it comes, up to `most` bytes and what it may have beside `what` is bounded.

    Raises TooLargeError as soon as there are more, and what `hold` raises.
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
