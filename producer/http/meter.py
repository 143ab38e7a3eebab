"""Measures, logs and traces HTTP requests."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptq.shared.runtime import metrics
from promptq.shared.runtime.logs import get_logger, unbind
from promptq.shared.runtime.metrics import Histogram, Reading
from promptq.shared.runtime.tracing import Tracing

_UNKNOWN = "unknown"
"""Label for unknown paths and methods. With real names, any client could create time series."""
POLLED = frozenset({"/healthz", "/health", "/readyz", "/metrics", "/scaling"})
"""Paths that monitoring systems poll."""
_FILES = ("/favicon.ico", "/dashboard/files/")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_TRACE_HEADERS = (b"traceparent", b"tracestate")


def _is_call(path: str) -> bool:
    """Returns False for polled paths and the dashboard's files. Each visit loads twenty files."""
    return path not in POLLED and path != "/" and not path.startswith(_FILES)


class HttpMeter:
    """Counts the answers of a gateway, and measures their durations."""

    def __init__(self) -> None:
        self.num_open = 0
        """Number of requests that were not answered completely yet."""
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = defaultdict(
            lambda: Histogram(metrics.HTTP_SECONDS)
        )

    def readings(self) -> Iterator[Reading]:
        yield metrics.HTTP_OPEN, (), float(self.num_open)
        for labels, count in self._answered.items():
            yield metrics.HTTP_REQUESTS, labels, float(count)
        for labels_of_time, histogram in self._seconds.items():
            yield metrics.HTTP_SECONDS, labels_of_time, histogram

    def add(self, handler: str, method: str, status: str, seconds: float) -> None:
        """Counts an answer. `handler` is the path of its route, such as `/v1/files/{file_id}`."""
        self._answered[handler, method, status] += 1
        self._seconds[handler, method].add(seconds)


class Measured:
    """Middleware that counts requests in `meter` and logs them: calls at the level info if `logs`
    is true, everything else at the level debug."""

    def __init__(self, app: ASGIApp, meter: HttpMeter, logs: bool) -> None:
        self._app = app
        self._meter = meter
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        unbind("request_id")  # a pipelined request begins in the task of the request before it
        status = "500"  # if the application raises before it answers

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        started = time.monotonic()
        self._meter.num_open += 1
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._meter.num_open -= 1
            seconds = time.monotonic() - started
            handler: Any = getattr(scope.get("route"), "path", _UNKNOWN)
            method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN
            self._meter.add(handler, method, status, seconds)
            # The entry has the `request_id` that the route has bound. It does not have the query,
            # which may contain a secret.
            path, ms = scope["path"], round(seconds * 1000, 1)
            is_info = self._logs and _is_call(path)
            log: Any = get_logger().info if is_info else get_logger().debug
            log("answered", method=scope["method"], path=path, status=int(status), ms=ms)


class Traced:
    """Middleware that creates a span for each call."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_call(scope["path"]):
            await self._app(scope, receive, send)
            return
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _TRACE_HEADERS
        }
        method = scope["method"]
        with self._tracing.tracer.start_as_current_span(
            method,
            # A pipelined request begins inside the span of the request before it.
            context=self._tracing.parent(headers) or Context(),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": scope["path"]},
        ) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self._app(scope, receive, send_and_note)
            finally:
                if (route := getattr(scope.get("route"), "path", None)) is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
