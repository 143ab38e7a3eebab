"""Measures, logs and traces HTTP requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptq.shared.runtime import metrics
from promptq.shared.runtime.logs import get_logger, unbind
from promptq.shared.runtime.metrics import Histogram, Reading
from promptq.shared.runtime.tracing import Tracing

_UNKNOWN = "unknown"
"""Label for paths without a route and for unknown methods. With their real names, any client could
create new time series."""
POLLED = frozenset({"/healthz", "/health", "/readyz", "/metrics", "/scaling"})
"""Paths that monitoring calls all the time. They are left out of logs and traces."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_HEADERS = (b"traceparent", b"tracestate")


class HttpMeter:
    """Counts the answers of a gateway, and measures their durations."""

    def __init__(self) -> None:
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._num_open = 0

    def readings(self) -> Iterator[Reading]:
        yield metrics.HTTP_OPEN, (), float(self._num_open)
        for labels, count in self._answered.items():
            yield metrics.HTTP_REQUESTS, labels, float(count)
        for labels_of_time, histogram in self._seconds.items():
            yield metrics.HTTP_SECONDS, labels_of_time, histogram

    def begin(self) -> None:
        self._num_open += 1

    def end(self, handler: str, method: str, status: str, seconds: float) -> None:
        self._num_open -= 1
        self._answered[handler, method, status] += 1
        key = (handler, method)
        if key not in self._seconds:
            self._seconds[key] = Histogram(metrics.HTTP_SECONDS)
        self._seconds[key].add(seconds)


class _Measured:
    def __init__(self, app: ASGIApp, meter: HttpMeter, logs: bool) -> None:
        self._app = app
        self._meter = meter
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        unbind("request_id")  # a pipelined request begins in the task of the one before it
        status = "500"  # if the application raises before it answers

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        started = time.monotonic()
        self._meter.begin()
        try:
            await self._app(scope, receive, noting)
        finally:
            seconds = time.monotonic() - started
            handler: Any = getattr(scope.get("route"), "path", _UNKNOWN)
            method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN
            self._meter.end(handler, method, status, seconds)
            # The line has the `request_id` that the route has bound, but not the query, which may
            # be a secret.
            path, ms = scope["path"], round(seconds * 1000, 1)
            is_shown = self._logs and path not in POLLED
            log: Any = get_logger().info if is_shown else get_logger().debug
            log("answered", method=scope["method"], path=path, status=int(status), ms=ms)


def measure_http(app: FastAPI, *, logs: bool = True) -> FastAPI:
    """Counts the HTTP requests of `app`, and logs them. Call this before the app starts."""
    app.state.http_meter = HttpMeter()
    app.add_middleware(_Measured, meter=app.state.http_meter, logs=logs)
    return app


class _Traced:
    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in POLLED:
            await self._app(scope, receive, send)
            return
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _HEADERS
        }
        method = scope["method"]
        with self._tracing.tracer.start_as_current_span(
            method,
            # A pipelined request begins inside the span of the request before it.
            context=self._tracing.parent(headers) or Context(),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": scope["path"]},
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self._app(scope, receive, noting)
            finally:
                if (route := getattr(scope.get("route"), "path", None)) is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)


def trace_http(app: FastAPI, tracing: Tracing | None) -> FastAPI:
    """Traces the HTTP requests of `app`, unless `tracing` is None. Call this before the app
    starts."""
    if tracing is not None:
        app.add_middleware(_Traced, tracing=tracing)
    return app
