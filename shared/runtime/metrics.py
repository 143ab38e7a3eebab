"""Names, buckets and types of all metrics, for Prometheus.

A metric that vLLM also has gets vLLM's name after `promptq_`, with vLLM's labels and buckets
(vllm/v1/metrics/loggers.py). So a dashboard made for vLLM works after its prefix `vllm:` is
replaced. The one exception is `iteration_tokens`, which lacks vLLM's suffix `_total`, because only
counters may have it. Names have no colon: Prometheus reserves colons for rules
(https://prometheus.io/docs/practices/naming/), and OpenMetrics forbids them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

PREFIX = "promptq_"
ENGINE = "0"
"""The value of the label `engine`. vLLM numbers the engines of a process; a worker has only one."""

# fmt: off
_LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
_ROUND_TRIP = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5,
)
# fmt: on
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_ATTEMPTS = (1, 2, 3, 5, 10)


_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
_OF_WORKERS = ("model_name", "engine")


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """Definition of one metric. A counter is exposed with `_total` after its name, as in vLLM."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    documentation: str
    labels: tuple[str, ...] = _OF_WORKERS
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


# fmt: off
# Metrics of workers that vLLM has too.
RUNNING = Spec("gauge", "num_requests_running", "Requests in the batch.")
WAITING = Spec("gauge", "num_requests_waiting", "Requests that a worker holds and that are"
               " not in its batch; of a gateway: requests that wait in the queue.")
KV_USAGE = Spec("gauge", "kv_cache_usage_perc", "Share of KV blocks in use; 1 means 100 percent.")
PREFIX_QUERIES = Spec("counter", "prefix_cache_queries", "Prompt tokens looked up in the cache.")
PREFIX_HITS = Spec("counter", "prefix_cache_hits", "Prompt tokens found in the cache.")
PREEMPTIONS = Spec("counter", "num_preemptions", "Preemptions of running requests.")
PROMPT_TOKENS = Spec("counter", "prompt_tokens", "Prompt tokens, found in the cache or computed.")
GENERATION_TOKENS = Spec("counter", "generation_tokens", "Generated tokens.")
SUCCESS = Spec("counter", "request_success", "Requests that ended while a worker held them, by"
               " reason (abort: cancelled). Those that end while they wait are in a gateway's"
               " http_requests, by status.",
               ("model_name", "engine", "finished_reason"))
DRAFTED = Spec("counter", "spec_decode_num_draft_tokens", "Drafted tokens.")
ACCEPTED = Spec("counter", "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
FIRST_TOKEN = Spec("histogram", "time_to_first_token_seconds",
                   "From enqueueing to the first token, including the time in the queue.",
                   buckets=_FIRST_TOKEN)
BETWEEN_TOKENS = Spec("histogram", "inter_token_latency_seconds",
                      "Between two outputs of a request, as the engine makes them.",
                      buckets=_BETWEEN_TOKENS)
END_TO_END = Spec("histogram", "e2e_request_latency_seconds", "From enqueueing to the end.",
                  buckets=_LATENCY)
QUEUE_TIME = Spec("histogram", "request_queue_time_seconds",
                  "From enqueueing to the first prefill.", buckets=_LATENCY)
PREFILL_TIME = Spec("histogram", "request_prefill_time_seconds",
                    "From the first prefill to the first token.", buckets=_LATENCY)
DECODE_TIME = Spec("histogram", "request_decode_time_seconds", "From the first token to the end.",
                   buckets=_LATENCY)
INFERENCE_TIME = Spec("histogram", "request_inference_time_seconds",
                      "From the first prefill to the end.", buckets=_LATENCY)
TOKEN_TIME = Spec("histogram", "request_time_per_output_token_seconds",
                  "Mean time between two tokens of a request.", buckets=_BETWEEN_TOKENS)
REQUEST_PROMPT = Spec("histogram", "request_prompt_tokens", "Prompt tokens of a request.",
                      buckets=_REQUEST_TOKENS)
REQUEST_OUTPUT = Spec("histogram", "request_generation_tokens", "Generated tokens of a request.",
                      buckets=_REQUEST_TOKENS)
REQUEST_MOST_OUTPUT = Spec("histogram", "request_max_num_generation_tokens",
                           "Equals request_generation_tokens: a request is one sequence.",
                           buckets=_REQUEST_TOKENS)
REQUEST_MAX_TOKENS = Spec("histogram", "request_params_max_tokens", "max_tokens of a request.",
                          buckets=_REQUEST_TOKENS)
STEP_TOKENS = Spec("histogram", "iteration_tokens", "Tokens of an engine step.",
                   buckets=_STEP_TOKENS)

# Other metrics of workers.
LEASES = Spec("gauge", "leases", "Requests of which the worker holds the lease.")
PREFETCHED = Spec("gauge", "num_requests_prefetched", "Held requests that are prepared and wait"
                  " for a place in the batch.")
PREFETCH_WAIT = Spec("counter", "prefetch_wait_seconds",
                     "Time from preparation to hand-out; its mean: divide by prefetch_hand_outs.")
PREFETCH_HAND_OUTS = Spec("counter", "prefetch_hand_outs", "Prepared requests handed out.")
PREFETCH_FILL = Spec("counter", "prefetch_fill_seconds",
                     "Prepared requests summed over time; the rate is their average number.")
PREFETCH_EMPTY = Spec("counter", "prefetch_empty",
                      "How often the engine could take a request and none was prepared.")
ENGINE_SECONDS = Spec("counter", "engine_busy_seconds", "Time in engine steps.")
RECOMPUTED = Spec("counter", "recomputed_tokens", "Tokens that were computed again.")
STATE_BYTES = Spec("gauge", "recurrent_state_bytes",
                   "Memory for the states of recurrent layers, of slots and of shared prefixes.")
CLAIMS = Spec("counter", "claims", "Requests that were claimed, so attempts that began.")
AFFINITY_CLAIMS = Spec("counter", "affinity_claims", "Claimed requests by what affinity_ms did:"
                       " held: the worker had claimed their beginning before; missed: only other"
                       " workers had; left: workers first left them to others, too.",
                       ("model_name", "engine", "result"))
AFFINITY_CACHED = Spec("counter", "affinity_cached_tokens", "Prompt tokens found in the cache for"
                       " the held requests of affinity_claims that ended.")
REFUSED = Spec("counter", "claims_refused", "Claimed requests that were invalid.")
FENCES_LOST = Spec("counter", "fences_lost", "Requests that another attempt took from the worker,"
                   " because the worker was slow, frozen or cut off.")
ATTEMPTS = Spec("histogram", "request_attempts", "Attempts that a request needed until it ended.",
                buckets=_ATTEMPTS)
PUBLISH_TIME = Spec("histogram", "publish_seconds",
                    "Round trip of the events of one or more steps.", buckets=_ROUND_TRIP)
PUBLISHED = Spec("counter", "published_events", "Events that were published.")
CLAIM_TIME = Spec("histogram", "claim_seconds", "Round trip of a claim.", buckets=_ROUND_TRIP)

# Metrics of gateways: the queue as a whole, and HTTP.
QUEUE_UP = Spec("gauge", "queue_up", "1 if the queue can be reached; while it is 0, the queue's"
                " other metrics are missing.", ("queue",))
QUEUE_WAITING = Spec("gauge", "queue_requests_waiting", "Requests that wait, by priority.",
                     ("queue", "priority"))
QUEUE_DELAYED = Spec("gauge", "queue_requests_delayed", "Requests not yet due.", ("queue",))
QUEUE_ACTIVE = Spec("gauge", "queue_requests_active", "Requests held by workers.", ("queue",))
QUEUE_DEAD = Spec("gauge", "queue_dead_letters", "Dead letters: requests that were given up after"
                  " crashes.", ("queue",))
QUEUE_PAUSED = Spec("gauge", "queue_paused", "1 while the queue hands out nothing.", ("queue",))
SERVER_EVICTS = Spec("gauge", "queue_server_evicts", "1 if the server may delete requests to make"
                     " room, because its policy is not noeviction.", ("queue",))
WORKERS = Spec("gauge", "queue_workers", "Workers that are alive.", ("queue",))
DESIRED_WORKERS = Spec("gauge", "queue_workers_desired", "Number of workers that there should be.",
                       ("queue",))
WORK = Spec("gauge", "queue_work_seconds", "Time that one worker would need for the waiting"
            " and the running requests; missing until that was measured.", ("queue", "state"))
OLDEST = Spec("gauge", "queue_oldest_seconds", "How long the oldest request has waited.",
              ("queue",))
AT_RISK = Spec("gauge", "queue_deadlines_at_risk", "Requests that would miss their deadlines with"
               " the present workers.", ("queue",))
HTTP_REQUESTS = Spec("counter", "http_requests", "HTTP requests that were answered.",
                     ("handler", "method", "status"))
HTTP_SECONDS = Spec("histogram", "http_request_duration_seconds", "From an HTTP request to the end"
                    " of its answer.", ("handler", "method"), _FIRST_TOKEN)
HTTP_OPEN = Spec("gauge", "http_requests_open", "HTTP requests that are being answered.", ())
# fmt: on

ALL = tuple(spec for spec in list(globals().values()) if isinstance(spec, Spec))
WORKER_HISTOGRAMS = tuple(s for s in ALL if s.kind == "histogram" and s.labels == _OF_WORKERS)


class Histogram:
    """A histogram: the number of values in each bucket, and the sum. Only one thread may write."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, spec: Spec) -> None:
        self._bounds = spec.buckets
        self._counts = [0] * (len(spec.buckets) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Adds a value, counted `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def exposed(self) -> tuple[list[tuple[str, float]], float]:
        """Returns the number of values up to each bound, as pairs (bound, number), and the sum."""
        cumulated = itertools.accumulate(self._counts)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, cumulated), strict=True)), self._sum


Value = float | Histogram
Reading = tuple[Spec, Sequence[str], Value]
"""One sample of a metric: its definition, the values of its labels, and its value."""


class _Readings(Collector):
    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Any] = {}
        for spec, labels, value in self._read():
            if spec.name not in families:
                kind = _FAMILIES[spec.kind]
                families[spec.name] = kind(spec.full_name, spec.documentation, labels=spec.labels)
            parts = value.exposed() if isinstance(value, Histogram) else (value,)
            families[spec.name].add_metric(labels, *parts)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return []  # registering reads nothing


def registry_of(read: Callable[[], Iterable[Reading]]) -> CollectorRegistry:
    """Returns a registry that calls `read` at each scrape."""
    registry = CollectorRegistry()
    registry.register(_Readings(read))
    return registry
