"""Serves a worker's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.claims import AFFINITY_RESULTS
from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime import metrics
from promptq.shared.runtime.metrics import Reading
from promptq.worker.health.probes import url_of

if TYPE_CHECKING:
    from promptq.worker.serve.worker import Worker

_ENGINE_STATISTIC = {
    metrics.PREFIX_QUERIES: "cached_tokens",
    metrics.PREFIX_HITS: "cached_tokens",
    metrics.DRAFTED: "drafted_tokens",
    metrics.ACCEPTED: "accepted_tokens",
    metrics.RECOMPUTED: "recomputed_tokens",
    metrics.STATE_BYTES: "state_bytes",
    metrics.AFFINITY_CACHED: "affinity_cached_tokens",
}
"""Maps metrics to engine statistics. If the engine does not report one, its metric is left out."""
_REASONS_IN_VLLM = {FinishReason.CANCELLED: "abort"}  # where vLLM's name differs


def readings(worker: Worker) -> Iterator[Reading]:
    """Yields the current values of all metrics of a worker. Any thread may call this function."""
    engine, meter, ready = worker.engine.stats, worker.meter, worker.leases.ready
    model = (worker.served.identity.name, metrics.ENGINE)
    gauges_and_counters = {
        metrics.RUNNING: engine.num_running,
        metrics.WAITING: engine.num_waiting + len(ready),
        metrics.KV_USAGE: engine.num_used_blocks / max(1, engine.num_blocks),
        metrics.PREFIX_QUERIES: engine.prompt_tokens + engine.cached_tokens,
        metrics.PREFIX_HITS: engine.cached_tokens,
        metrics.PREEMPTIONS: engine.num_preemptions,
        metrics.PROMPT_TOKENS: engine.prompt_tokens + engine.cached_tokens,
        metrics.GENERATION_TOKENS: engine.generation_tokens,
        metrics.DRAFTED: engine.drafted_tokens,
        metrics.ACCEPTED: engine.accepted_tokens,
        metrics.LEASES: len(worker.leases),
        metrics.PREFETCHED: len(ready),
        metrics.PREFETCH_WAIT: ready.waited_seconds,
        metrics.PREFETCH_HAND_OUTS: ready.num_handed_out,
        metrics.PREFETCH_FILL: ready.filled_seconds,
        metrics.PREFETCH_EMPTY: ready.num_empty,
        metrics.ENGINE_SECONDS: engine.busy_seconds,
        metrics.RECOMPUTED: engine.recomputed_tokens,
        metrics.STATE_BYTES: worker.engine.limits.state_bytes,
        metrics.CLAIMS: meter.num_claimed,
        metrics.REFUSED: meter.num_refused,
        metrics.FENCES_LOST: meter.num_fences_lost,
        metrics.PUBLISHED: meter.num_published,
    }
    if meter.num_by_affinity:
        gauges_and_counters[metrics.AFFINITY_CACHED] = meter.affinity_cached_tokens
        for result in AFFINITY_RESULTS:
            num = meter.num_by_affinity[result]
            yield metrics.AFFINITY_CLAIMS, (*model, result), float(num)
    unreported = worker.engine.abilities.unreported
    for spec, value in gauges_and_counters.items():
        if _ENGINE_STATISTIC.get(spec) not in unreported:
            yield spec, model, float(value)
    for reason in FinishReason:
        labels = (*model, _REASONS_IN_VLLM.get(reason, reason.value))
        yield metrics.SUCCESS, labels, float(meter.num_ended[reason])
    for spec, histogram in meter.histograms.items():
        yield spec, model, histogram


class MetricsServer:
    """Serves a worker's metrics over HTTP, in a separate thread.

    Port 0 selects a free port. Raises ConfigurationError if the port is in use.
    """

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        registry = metrics.registry_of(lambda: readings(worker))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigurationError(
                f"--metrics-port: cannot listen at {host}:{port} ({error.strerror});"
                " 0 selects a free port"
            ) from error

    @property
    def url(self) -> str:
        return f"{url_of(self._server.server_address)}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
