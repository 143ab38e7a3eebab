"""A span for each HTTP request, a child of the caller's span if it sends a `traceparent`."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from promptq.producer.gateway.http.meter import POLLED
from promptq.shared.runtime.tracing import Tracing

_HEADERS = (b"traceparent", b"tracestate")


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

        given = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _HEADERS
        }
        method = scope["method"]
        with self._tracing.tracer.start_as_current_span(
            method,
            # A pipelined request begins inside the span of the request before it.
            context=self._tracing.parent(given) or Context(),
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
    """Trace the HTTP requests of `app`, unless `tracing` is None. Call it before the start."""
    if tracing is not None:
        app.add_middleware(_Traced, tracing=tracing)
    return app
