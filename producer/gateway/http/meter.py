"""Counts, times and logs HTTP requests, without touching the streamed bytes."""

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

_UNKNOWN = "unknown"
"""The label for paths without a route and for unknown methods, so that strangers cannot create
time series."""
POLLED = frozenset({"/healthz", "/health", "/readyz", "/metrics", "/scaling"})
"""Paths that are asked all the time, and would fill logs and traces."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMeter:
    """Counts what a gateway has answered."""

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
            _log_answer(scope, status, seconds, self._logs)


def _log_answer(scope: Scope, status: str, seconds: float, logs: bool) -> None:
    """Log with the `request_id` that the route has bound, but without the query, maybe a secret."""
    level = "info" if logs and scope["path"] not in POLLED else "debug"
    method, path = scope["method"], scope["path"]
    line: Any = getattr(get_logger(), level)
    line("answered", method=method, path=path, status=int(status), ms=round(seconds * 1000, 1))


def measure_http(app: FastAPI, *, logs: bool = True) -> FastAPI:
    """Count the HTTP requests of `app`, and log them. Call it before the app starts."""
    app.state.http_meter = HttpMeter()
    app.add_middleware(_Measured, meter=app.state.http_meter, logs=logs)
    return app
