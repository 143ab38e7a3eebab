"""Spans of enqueueing. Each request carries the trace context of its span to its worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from promptq.shared.protocol.request import NewRequest
from promptq.shared.runtime.tracing import Tracing


@contextmanager
def enqueueing(
    tracing: Tracing | None, queue: str, new: list[NewRequest]
) -> Iterator[list[NewRequest]]:
    """Yields copies of the requests with new spans. The `with` block must enqueue these copies.

    The parent of a span is the request's `trace_context`, or else the caller's current span.
    """
    if tracing is None:
        yield new
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    spans, traced = [], []
    for item in new:
        span = tracing.tracer.start_span(
            f"send {queue}",
            context=tracing.parent(item.request.trace_context),
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": "promptq",
                "messaging.operation.type": "send",
                "messaging.operation.name": "enqueue",
                "messaging.destination.name": queue,
                "messaging.message.id": item.request_id,
            },
        )
        request = item.request.model_copy(update={"trace_context": tracing.context_of(span)})
        spans.append(span)
        traced.append(replace(item, request=request))
    try:
        yield traced
    except Exception as error:
        for span in spans:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            span.set_attribute("error.type", type(error).__name__)
        raise
    finally:
        for span in spans:
            span.end()
