"""Counts and measures a worker's work, with one update a step instead of one a token."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.statistics import Contribution
from promptq.shared.runtime import metrics
from promptq.shared.runtime.metrics import Histogram, Spec
from promptq.worker.engine.api.messages import StepOutput
from promptq.worker.leases.rows import PreparedRequest

_MAX_TIMES = 2048
"""The most times to first token that one heartbeat reports. Further first tokens are only
counted."""

_MEANS = ("queue_ms", "prompt_ms", "generation_ms")


class Meter:
    """Counters and histograms of a worker's work. The parts of the worker update them in the event
    loop. Heartbeats and metric scrapes read them."""

    def __init__(self) -> None:
        self.histograms = {spec: Histogram(spec) for spec in metrics.WORKER_HISTOGRAMS}
        self.num_claimed = 0
        self.num_refused = 0
        self.num_published = 0
        self.num_fences_lost = 0
        self.num_ended: Counter[FinishReason] = Counter()
        self._gaps: defaultdict[float, int] = defaultdict(int)  # last token -> how many
        self._num_computed = 0  # tokens that the engine had computed by the last step
        self._contribution = Contribution()
        self._num_with_stats = 0
        self._sums = dict.fromkeys(_MEANS, 0.0)

    def observe(self, spec: Spec, value: float, count: int = 1) -> None:
        """Add `value` to the histogram of `spec`, `count` times."""
        self.histograms[spec].add(value, count)

    def note_output(self, held: PreparedRequest, at: float) -> None:
        """Record that a step generated tokens of a request. `at` is the end of the step, in seconds
        of `time.monotonic()`."""
        last = held.last_token_at
        if last is None:
            self._note_first_token(held, at)
        else:
            self._gaps[last] += 1  # most of a batch had their last token in the same step
        held.last_token_at = at

    def note_step(self, step: StepOutput) -> None:
        """Record a step, after `note_output` for all its outputs."""
        for last, count in self._gaps.items():
            self.observe(metrics.BETWEEN_TOKENS, step.ended_at - last, count)
        self._gaps.clear()
        stats = step.stats
        num_computed = stats.prompt_tokens + stats.generation_tokens + stats.recomputed_tokens
        if num_computed > self._num_computed:
            self.observe(metrics.STEP_TOKENS, num_computed - self._num_computed)
            self._num_computed = num_computed

    def note_publish(self, num_rows: int, seconds: float) -> None:
        """Record a round trip that sent `num_rows` events and took `seconds`."""
        self.num_published += num_rows
        self.observe(metrics.PUBLISH_TIME, seconds)

    def note_end(self, reason: FinishReason, held: PreparedRequest | None = None) -> None:
        """Record the end of a request. `held` is None if the request was never prepared here."""
        self._contribution.finished += 1
        self.num_ended[reason] += 1
        stats = held.stats if held is not None else None
        if held is None or stats is None:
            return
        self._num_with_stats += 1
        for name in _MEANS:
            self._sums[name] += getattr(stats, name)
        end_to_end_ms = max(0.0, held.claim.server_ms(time.monotonic()) - held.claim.enqueued_at_ms)
        self.observe(metrics.END_TO_END, end_to_end_ms / 1000)
        self.observe(metrics.PREFILL_TIME, stats.prompt_ms / 1000)
        self.observe(metrics.DECODE_TIME, stats.generation_ms / 1000)
        self.observe(metrics.INFERENCE_TIME, (stats.prompt_ms + stats.generation_ms) / 1000)
        if stats.tokens_per_second:  # not of a single token
            self.observe(metrics.TOKEN_TIME, 1 / stats.tokens_per_second)
        self.observe(metrics.REQUEST_PROMPT, held.num_prompt_tokens)
        self.observe(metrics.REQUEST_OUTPUT, held.num_emitted)
        self.observe(metrics.REQUEST_MOST_OUTPUT, held.num_emitted)
        self.observe(metrics.REQUEST_MAX_TOKENS, held.engine_request.max_tokens)
        self.observe(metrics.ATTEMPTS, held.claim.attempt)

    def mean_ms(self, name: str) -> float:
        """Returns the mean of the time called `name` in `Stats`, in ms, over the requests that
        ended."""
        return self._sums[name] / max(1, self._num_with_stats)

    def take_contribution(self) -> Contribution:
        """Returns the counts since the last call, for the statistics of the queue."""
        taken, self._contribution = self._contribution, Contribution()
        return taken

    def _note_first_token(self, held: PreparedRequest, at: float) -> None:
        if held.claim.num_logged:
            return  # the first token came in an earlier attempt
        enqueued_at = held.claim.enqueued_at_ms
        first_token_ms = max(0, held.claim.server_ms(at) - enqueued_at)
        queue_ms = first_token_ms
        if held.timing is not None and held.timing.scheduled_at is not None:
            queue_ms = max(0, held.claim.server_ms(held.timing.scheduled_at) - enqueued_at)
        self.observe(metrics.FIRST_TOKEN, first_token_ms / 1000)
        self.observe(metrics.QUEUE_TIME, queue_ms / 1000)
        part = self._contribution
        if len(part.first_token_ms) < _MAX_TIMES:
            part.first_token_ms.append(first_token_ms)
            part.queue_ms.append(queue_ms)
