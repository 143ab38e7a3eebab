"""Notes each request that leaves the worker: in the log, the meter and the trace."""

from __future__ import annotations

from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime.logs import get_logger
from promptq.worker.leases.lease import Lease
from promptq.worker.leases.leases import Departure, Outcome
from promptq.worker.telemetry.meter import Meter
from promptq.worker.telemetry.tracing import RequestTracer


class Departures:
    """Passes each departure to the log, the meter and the tracer."""

    def __init__(self, meter: Meter, tracer: RequestTracer, worker_id: str = "") -> None:
        self._meter = meter
        self._tracer = tracer
        self._log = get_logger(worker_id=worker_id).bind()  # once, not at each line

    def note(self, lease: Lease, outcome: Outcome | None) -> None:
        """A request has left with this outcome. None means that there is nothing to note."""
        if outcome is None:
            return
        prepared = lease.prepared_or_none
        if isinstance(outcome, FinishReason):
            self._log.debug("ended", request_id=lease.request_id, reason=outcome)
            self._meter.note_end(outcome, prepared)
        elif outcome is Departure.FENCED:
            self._log.warning("lease lost", request_id=lease.request_id)
            self._meter.num_fences_lost += 1
        if prepared is not None:
            self._tracer.end(prepared, outcome)
