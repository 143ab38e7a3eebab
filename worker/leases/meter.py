"""Counts and measures a worker's work. Most histograms change once a step, not once a token."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.statistics import Contribution
from promptq.shared.runtime import metrics
from promptq.shared.runtime.metrics import Histogram, Spec
from promptq.worker.engine.api.messages import StepOutput
from promptq.worker.leases.rows import PreparedRequest

_MAX_TIMES = 2048  # per heartbeat; further times are left out

_MEANS = ("queue_ms", "prompt_ms", "generation_ms")


class Meter:
    """Counters and histograms of a worker's work. The parts of the worker update them in the event
    loop. Heartbeats and metric scrapes read them."""

    def __init__(self) -> None:
        self.histograms = {spec: Histogram(spec) for spec in metrics.WORKER_HISTOGRAMS}
        self.histograms[metrics.REQUEST_MOST_OUTPUT] = self.histograms[metrics.REQUEST_OUTPUT]
        self.num_claimed = 0
        self.num_refused = 0
        self.num_published = 0
        self.num_fences_lost = 0
        self.num_ended: Counter[FinishReason] = Counter()
        self.num_by_affinity: Counter[str] = Counter()
        """Counts claimed requests by the words of `Claim.affinity`."""
        self.affinity_cached_tokens = 0
        """Prompt tokens that the cache had for the ended requests that count as `held`."""
        self._gaps: defaultdict[float, int] = defaultdict(int)
        """Counts sequences that got a token in this step, by the time of their previous token."""
        self._num_computed = 0  # tokens that the engine had computed by the last step
        self._contribution = Contribution()
        self._num_with_stats = 0
        self._sums = dict.fromkeys(_MEANS, 0.0)

    def observe(self, spec: Spec, value: float, count: int = 1) -> None:
        """Add `value` to the histogram of `spec`, `count` times."""
        self.histograms[spec].add(value, count)

    def note_claims(self, claims: Sequence[Claim]) -> None:
        self.num_claimed += len(claims)
        for claim in claims:
            self.num_by_affinity.update(claim.affinity.split())

    def note_output(self, prepared: PreparedRequest, at: float) -> None:
        """Record a request's new tokens from a step that ended at `at` (`time.monotonic()`)."""
        last = prepared.last_token_at
        if last is None:
            self._note_first_token(prepared, at)
        else:
            self._gaps[last] += 1  # most sequences of a batch have the same time here
        prepared.last_token_at = at

    def note_step(self, step: StepOutput) -> None:
        """Record a step of the engine, after `note_output` for each output of the step."""
        for last, count in self._gaps.items():
            self.observe(metrics.BETWEEN_TOKENS, step.ended_at - last, count)
        self._gaps.clear()
        stats = step.stats
        num_computed = stats.prompt_tokens + stats.generation_tokens + stats.recomputed_tokens
        if num_computed > self._num_computed:
            self.observe(metrics.STEP_TOKENS, num_computed - self._num_computed)
            self._num_computed = num_computed

    def note_publish(self, num_rows: int, seconds: float) -> None:
        """Record a round trip to Redis that sent `num_rows` events and took `seconds`."""
        self.num_published += num_rows
        self.observe(metrics.PUBLISH_TIME, seconds)

    def note_end(self, reason: FinishReason, prepared: PreparedRequest | None) -> None:
        """Record the end of a request. `prepared` is None if this worker did not prepare it."""
        self._contribution.finished += 1
        self.num_ended[reason] += 1
        if prepared and prepared.timing and "held" in prepared.claim.affinity:
            self.affinity_cached_tokens += prepared.timing.cached_tokens
        if prepared is None or (stats := prepared.stats) is None:
            return
        self._num_with_stats += 1
        for name in _MEANS:
            self._sums[name] += getattr(stats, name)
        claim = prepared.claim
        end_to_end_ms = max(0.0, claim.server_ms(time.monotonic()) - claim.enqueued_at_ms)
        self.observe(metrics.END_TO_END, end_to_end_ms / 1000)
        self.observe(metrics.PREFILL_TIME, stats.prompt_ms / 1000)
        self.observe(metrics.DECODE_TIME, stats.generation_ms / 1000)
        self.observe(metrics.INFERENCE_TIME, (stats.prompt_ms + stats.generation_ms) / 1000)
        if stats.tokens_per_second:  # 0 for a single token
            self.observe(metrics.TOKEN_TIME, 1 / stats.tokens_per_second)
        self.observe(metrics.REQUEST_PROMPT, prepared.num_prompt_tokens)
        self.observe(metrics.REQUEST_OUTPUT, prepared.num_emitted)
        self.observe(metrics.REQUEST_MAX_TOKENS, prepared.engine_request.max_tokens)
        self.observe(metrics.ATTEMPTS, claim.attempt)

    def mean_ms(self, name: str) -> float:
        """Returns the mean of the field `name` of `Stats` over all requests that ended on this
        worker, in milliseconds."""
        return self._sums[name] / max(1, self._num_with_stats)

    def take_contribution(self) -> Contribution:
        """Returns this worker's counts since the last call, for the queue's statistics."""
        taken, self._contribution = self._contribution, Contribution()
        return taken

    def _note_first_token(self, prepared: PreparedRequest, at: float) -> None:
        claim, timing = prepared.claim, prepared.timing
        if claim.num_logged:
            return  # the first token came in an earlier attempt
        first_token_ms = queue_ms = max(0, claim.server_ms(at) - claim.enqueued_at_ms)
        if timing is not None and timing.scheduled_at is not None:
            queue_ms = max(0, claim.server_ms(timing.scheduled_at) - claim.enqueued_at_ms)
        self.observe(metrics.FIRST_TOKEN, first_token_ms / 1000)
        self.observe(metrics.QUEUE_TIME, queue_ms / 1000)
        part = self._contribution
        if len(part.first_token_ms) < _MAX_TIMES:
            part.first_token_ms.append(first_token_ms)
            part.queue_ms.append(queue_ms)
