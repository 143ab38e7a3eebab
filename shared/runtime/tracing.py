"""OpenTelemetry traces (the optional extra `tracing`).

The library is imported only if traces are sent. A request carries the trace context of the span
that enqueued it, so one trace covers the client and the worker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import TraceContext
from promptq.shared.runtime.extras import how_to_install

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

_STANDARD_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACES_PATH = "/v1/traces"
_CLOSE_SECONDS = 5.0


class Tracing:
    """Creates spans with the tracer provider of an application, or of `start_tracing`."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.tracer = provider.get_tracer("promptq")
        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()

    def parent(self, context: TraceContext | Mapping[str, str] | None) -> Context | None:
        """Returns the trace context in a request or in HTTP headers; None if `context` has none."""
        if context is None:
            return None
        carrier = context.carrier if isinstance(context, TraceContext) else context
        return self._propagator.extract(carrier) if carrier else None

    def context_of(self, span: Span) -> TraceContext:
        """Returns a span's trace context. A request that carries it continues the span's trace."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return TraceContext(**carrier)

    def close(self) -> None:
        """Sends the remaining spans, which takes at most some seconds."""
        shut_down = getattr(self._provider, "shutdown", None)
        if shut_down is not None:  # shutdown waits for the collector without a limit
            closing = Thread(target=shut_down, daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)


def start_tracing(service: str, endpoint: str | None = None) -> Tracing | None:
    """Returns a `Tracing` that sends spans to an OTLP collector by HTTP; None without an address.

    `endpoint` is the collector's base URL, such as http://localhost:4318. The default is the
    variable OTEL_EXPORTER_OTLP_ENDPOINT. OpenTelemetry's other variables have their usual effect;
    OTEL_SERVICE_NAME replaces `service`. Raises ConfigurationError if the extra is missing.
    """
    if not (endpoint or any(map(os.environ.get, _STANDARD_VARIABLES))):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"otlp_endpoint: traces need the extra: {how_to_install('tracing')}"
        ) from error
    if endpoint and not endpoint.endswith(_TRACES_PATH):
        endpoint = endpoint.rstrip("/") + _TRACES_PATH
    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint or None)))
    return Tracing(provider)
