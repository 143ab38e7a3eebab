"""Reads the body of an HTTP request, no more of it than is allowed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from promptq.producer.gateway.http.errors import ApiError

_MOST_DROPPED_BYTES = 1 << 28


class TooLargeError(ApiError):
    """413. Its answer goes out at once; then the `rest` of the body is dropped, up to 256 MiB.

    Most clients send all of a body before they read an answer. Closed while they still send, the
    connection is reset, and the answer may be lost with it.
    """

    def __init__(self, what: str, most: int, rest: AsyncIterator[bytes]) -> None:
        super().__init__(
            413,
            f"the {what} is larger than the {most} bytes that are allowed",
            param=None if what == "body" else what,
            code=f"{what}_too_large",
            headers={"Connection": "close"},
        )
        self._rest = rest

    def response(self) -> JSONResponse:
        return _AnswerBeforeTheEnd(self.body, self.status, self.headers, self._rest)


async def read_body(request: Request, most: int) -> bytes:
    """The body, up to `most` bytes. Raises TooLargeError as soon as there are more."""
    return b"".join([piece async for piece in body_pieces(request, most)])


async def body_pieces(
    request: Request, most: int, *, most_beside: int = 0, what: str = "body"
) -> AsyncGenerator[bytes, None]:
    """The body as it comes, up to `most` bytes and what it may have beside `what` is bounded.

    Raises TooLargeError as soon as there are more.
    """
    pieces = request.stream()
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most + most_beside:
        raise TooLargeError(what, most, pieces)
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > most + most_beside:
            raise TooLargeError(what, most, pieces)
        yield piece


class BoundedRoute(APIRoute):
    """For bodies that FastAPI reads: it does so before it asks who calls, and without a bound."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            most = request.app.state.gateway.settings.http_max_body_bytes
            body = await read_body(request, most)

            async def replay() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            return await handle(Request(request.scope, replay))

        return bounded


class _AnswerBeforeTheEnd(JSONResponse):
    """All of the answer is sent before the rest of the body is read, and the end of it after."""

    def __init__(
        self, content: object, status: int, headers: dict[str, str], rest: AsyncIterator[bytes]
    ) -> None:
        super().__init__(content, status, headers)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        dropped = 0
        with suppress(ClientDisconnect):
            async for piece in self._rest:
                dropped += len(piece)
                if dropped > _MOST_DROPPED_BYTES:
                    break
        await send({"type": "http.response.body", "body": b""})
