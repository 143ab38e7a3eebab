"""Reads the body of an HTTP request, no more of it than is allowed."""

from __future__ import annotations

from fastapi import Request

from producer.gateway.errors import ApiError


async def read_body(request: Request, most: int) -> bytes:
    """The body, up to `most` bytes. Raises ApiError 413 as soon as there are more."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(most: int) -> ApiError:
    # The rest of the body is not read, so nothing can follow on this connection.
    return ApiError(
        413,
        f"the body is larger than the {most} bytes that are allowed",
        code="body_too_large",
        headers={"Connection": "close"},
    )
