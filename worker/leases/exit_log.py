"""Records how each request leaves the worker: in the log, the metrics and the trace.

The trace span of a request is created only when the request leaves, so tracing adds no work for
each token. Attributes have the names of OpenTelemetry's conventions for generative AI and
messaging.
"""

from __future__ import annotations

import time

from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime.logs import get_logger
from promptq.shared.runtime.tracing import Tracing
from promptq.worker.leases.held_and_lost_leases import Exit, Outcome
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.meter import Meter
from promptq.worker.leases.rows import PreparedRequest

_NS_A_MS = 1_000_000


class ExitLog:
    """Records how requests leave the worker. `tracing` is None if the worker writes no traces."""

    def __init__(
        self, meter: Meter, tracing: Tracing | None, queue: str, model: str, worker_id: str
    ) -> None:
        self._meter = meter
        self._tracing = tracing
        self._queue = queue
        self._model = model
        self._worker_id = worker_id
        self._log = get_logger(worker_id=worker_id).bind()  # once, not at each line

    def note(self, lease: Lease, outcome: Outcome | None) -> None:
        """Record how a request has left the worker. Does nothing if `outcome` is None."""
        if outcome is None:
            return
        prepared = lease.prepared_or_none
        if isinstance(outcome, FinishReason):
            self._log.debug("ended", request_id=lease.request_id, reason=outcome)
            self._meter.note_end(outcome, prepared)
        elif outcome is Exit.FENCED:
            self._log.warning("lease lost", request_id=lease.request_id)
            self._meter.num_fences_lost += 1
        if prepared is not None and self._tracing is not None:
            self._trace(prepared, outcome, self._tracing)

    def _trace(self, prepared: PreparedRequest, outcome: str, tracing: Tracing) -> None:
        # The span of the first attempt begins at the enqueueing, the span of a later attempt at its
        # claim. All times are from the server's clock.
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        claim, timing = prepared.claim, prepared.timing
        begin_ms = claim.enqueued_at_ms if claim.attempt == 1 else claim.claimed_at_ms
        end_ms = max(begin_ms, claim.server_ms(time.monotonic()))
        operation = "text_completion" if prepared.request.messages is None else "chat"
        span = tracing.tracer.start_span(
            f"{operation} {self._model}",
            context=tracing.parent(prepared.request.trace_context),
            kind=SpanKind.CONSUMER,
            start_time=begin_ms * _NS_A_MS,
            attributes=self._attributes(prepared, operation, outcome),
        )
        if outcome == FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
            kind = prepared.error.type if prepared.error is not None else "internal_error"
            span.set_attribute("error.type", kind)
        marks = [begin_ms]
        if timing is not None:
            for name, times in (("preempted", timing.preempted_at), ("resumed", timing.resumed_at)):
                for at in times:
                    span.add_event(name, timestamp=claim.server_ms(at) * _NS_A_MS)
            reached = [timing.scheduled_at, timing.first_token_at]
            marks += [claim.server_ms(at) for at in reached if at is not None]
        marks.append(end_ms)
        inside = set_span_in_context(span)
        for name, start, end in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            part = tracing.tracer.start_span(name, context=inside, start_time=start * _NS_A_MS)
            part.end(max(start, end) * _NS_A_MS)
        span.end(end_ms * _NS_A_MS)

    def _attributes(
        self, prepared: PreparedRequest, operation: str, outcome: str
    ) -> dict[str, str | int | float | list[str]]:
        request, timing = prepared.request, prepared.timing
        attributes: dict[str, str | int | float | list[str] | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "promptq",
            "gen_ai.request.model": request.model or self._model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.top_k": request.top_k or None,
            "gen_ai.request.frequency_penalty": request.frequency_penalty or None,
            "gen_ai.request.presence_penalty": request.presence_penalty or None,
            "gen_ai.request.seed": request.seed,
            "gen_ai.request.stop_sequences": request.stop_strings or None,
            "gen_ai.response.id": prepared.request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [outcome],
            "gen_ai.usage.input_tokens": prepared.num_prompt_tokens,
            "gen_ai.usage.output_tokens": prepared.num_emitted,
            "gen_ai.usage.cache_read.input_tokens": timing.cached_tokens if timing else None,
            "messaging.system": "promptq",
            "messaging.operation.type": "process",
            "messaging.destination.name": self._queue,
            "messaging.message.id": prepared.request_id,
            "promptq.worker": self._worker_id,
            "promptq.attempt": prepared.claim.attempt,
            "promptq.priority": request.priority,
            "promptq.tenant": request.tenant,
            "promptq.preemptions": timing.preemptions if timing else None,
        }
        return {name: value for name, value in attributes.items() if value is not None}
