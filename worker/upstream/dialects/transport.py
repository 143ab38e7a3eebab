"""HTTP to an inference server: JSON calls, streams of server-sent events, and their faults."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp
from pydantic_core import from_json

from promptq.shared.errors import ConfigurationError

_CALL_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_LONGEST_RETRY_AFTER = 60.0
"""The most seconds for which a `Retry-After` counts. A server may be well again much earlier."""
_LONGEST_LINE = 2**20
_MOST_BYTES = 2**24
"""The most bytes of an answer that is no stream. Usual answers have less than a megabyte."""
_MOST_BYTES_OF_ERROR = 2**16
_MOST_SHOWN = 500
_OVERLOADED = (429, 503)
_DATA = b"data:"
DONE = b"[DONE]"


class ServerFaultError(Exception):
    """The server does not answer, or broke off. The request returns to the queue."""


class AnsweredFaultError(ServerFaultError):
    """The server answers a call with status 500 or more. The call itself may be the cause."""


class SilentServerError(ServerFaultError):
    """The server is silent, or the connection failed."""


class UnusableAnswerError(Exception):
    """The server's answer to one request has an impossible value, such as a NaN."""


class OverloadedError(Exception):
    """The server accepts no more requests for now, or for `seconds` if it reports a time."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class RefusedError(Exception):
    """The server refuses this one request, and would do so again. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_servers(self) -> bool:
        """Whether the cause is the server, or a proxy in front of it, and not the request."""
        return self.status in (403, 404)


@contextmanager
def malformed_as_fault() -> Iterator[None]:
    """Inside this context, errors about the form of a server's answer become ServerFaultError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ServerFaultError(f"the server's answer is malformed: {error!r:.500}") from error


@contextmanager
def answering_as(kind: str, server: Server) -> Iterator[None]:
    """Inside this context, raise ConfigurationError if the server refuses a call, or if an answer
    lacks a field that servers of this `kind` send."""
    try:
        yield
    except (RefusedError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--upstream: {server.url} does not answer as {kind} does ({error!s:.500})"
        ) from error


class Server:
    """Calls one inference server from one event loop. Call `close` at the end.

    All methods raise ServerFaultError, OverloadedError, RefusedError and ConfigurationError.
    """

    def __init__(self, url: str, key: str | None = None, idle_seconds: float = 120.0) -> None:
        """Prepares calls. A stream fails if it is silent for `idle_seconds`."""
        self.url = url
        self.idle_seconds = idle_seconds
        headers = {"Accept-Encoding": "identity"}  # a small answer may unpack to gigabytes
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # Each call opens a new connection. Servers close one after some seconds without a
            # call, or after some calls, and a call at that moment would look like a fault.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # a server could fill one without end
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """Returns the answer to a GET: parsed JSON, or text. Waits for up to 10 seconds."""
        return await self._call("GET", path, _CALL_SECONDS)

    async def post(self, path: str, body: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Returns the answer to a POST: parsed JSON, or text. Waits for up to `seconds`."""
        return await self._call("POST", path, seconds, json=body)

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """Context with an iterator of the data of each server-sent event. If the caller leaves the
        context early, the connection closes, so that the server can stop computing."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=self.idle_seconds
        )
        with _as_faults(self.url):
            async with self._session.post(
                self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                await _check(response)
                yield _events(response)

    async def _call(self, method: str, path: str, seconds: float, **options: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds)
        with _as_faults(self.url):
            async with self._session.request(
                method, self.url + path, timeout=timeout, allow_redirects=False, **options
            ) as response:
                await _check(response)
                read = await _read(response, _MOST_BYTES + 1)
                if len(read) > _MOST_BYTES:
                    raise ServerFaultError(f"{path}: its answer has more than {_MOST_BYTES} bytes")
                text = read.decode("utf-8", "replace")
                if response.content_type != "application/json":
                    return text
                return read_json(text)


@contextmanager
def _as_faults(url: str) -> Iterator[None]:
    """Turn the client library's exceptions into faults of the server."""
    try:
        yield
    except TimeoutError as error:
        raise SilentServerError(f"{url} was silent for too long") from error
    except (aiohttp.ClientError, OSError) as error:
        raise SilentServerError(f"{url}: {_described(error)}") from error


def _described(error: Exception) -> str:
    """Returns an error's cause in words, without the library's names of options."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if cause.errno is None or isinstance(cause, socket.gaierror):
            return str(cause.strerror or cause)
        return os.strerror(cause.errno)  # asyncio's own text only says where it connected to
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it does not answer as an HTTP server: {error.message[:_MOST_SHOWN]}"
    return str(error) or type(error).__name__


def read_json(text: str | bytes) -> Any:
    """Returns JSON from a server, parsed. Raises ServerFaultError."""
    try:
        return from_json(text)
    except ValueError as error:
        raise ServerFaultError(f"sent text that is not JSON: {text[:_MOST_SHOWN]!r}") from error


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Returns up to `most` bytes of the body. The rest is never read."""
    pieces, left = [], most
    while left and (piece := await response.content.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises an error unless the response is an answer that can be read.

    No redirect is followed: the prompt would go to a server that the operator did not choose.
    """
    if 300 <= response.status < 400:
        place = response.headers.get("Location", "nowhere")[:_MOST_SHOWN]
        raise ServerFaultError(
            f"it redirects {response.url.path} to {place}, which is not followed; give the address"
            " of the inference server itself"
        )
    if response.status < 300:
        if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise ServerFaultError(
                f"it answers in the encoding {coding[:80]!r}, which was not requested"
            )
        return
    text = (await _read(response, _MOST_BYTES_OF_ERROR)).decode("utf-8", "replace")
    with suppress(ValueError):
        text = message_of(from_json(text)) or text
    text = text[:_MOST_SHOWN]
    if response.status == 401:
        raise ConfigurationError(f"--upstream-key: the server refuses the key: {text}")
    if response.status in _OVERLOADED:
        raise OverloadedError(text, _seconds(response.headers.get("Retry-After")))
    if response.status >= 500 and response.status != 501:
        raise AnsweredFaultError(f"status {response.status}: {text}")
    raise RefusedError(text, response.status)


def message_of(body: Any) -> str:
    """Returns the message of an error object; empty if the body is not an error object."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message", error) if isinstance(error, dict) else error or ""
    return str(message)[:_MOST_SHOWN]


def check_event(event: Any) -> None:
    """Raise OverloadedError, RefusedError or ServerFaultError if an event is an error object. The
    object's `code` selects the error."""
    if message := message_of(event):
        code = event["error"].get("code")
        if code in _OVERLOADED:
            raise OverloadedError(message)
        if isinstance(code, int) and 400 <= code < 500:
            raise RefusedError(message, code)
        raise ServerFaultError(message)


def _seconds(retry_after: str | None) -> float | None:
    try:
        seconds = float(retry_after) if retry_after else math.nan
    except ValueError:
        return None  # a date
    return max(0.0, min(seconds, _LONGEST_RETRY_AFTER)) if math.isfinite(seconds) else None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each event up to the server's end mark."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        *lines, end = piece.split(b"\n")
        if lines:
            lines[0] = bytes(rest + lines[0])
            rest.clear()
        rest += end
        if len(rest) > _LONGEST_LINE:
            raise ServerFaultError(f"sent a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == DONE:
                return
            yield data
