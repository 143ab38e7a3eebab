"""Measures what goes through a worker. A step costs one update, not each of its tokens."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from promptq.shared.protocol.request import FinishReason
from promptq.shared.queue.statistics import Contribution
from promptq.shared.runtime import metrics
from promptq.shared.runtime.metrics import Histogram
from promptq.worker.engine.api.messages import StepOutput
from promptq.worker.leases.prepared_request import PreparedRequest

_MAX_TIMES = 2048
"""Of so many first tokens between two heartbeats the times are told; further ones only count."""


class Meter:
    """Fed by the parts of a worker in its event loop; read by heartbeats and scrapes."""

    def __init__(self) -> None:
        self.first_token = Histogram(metrics.FIRST_TOKEN)
        self.between_tokens = Histogram(metrics.BETWEEN_TOKENS)
        self.end_to_end = Histogram(metrics.END_TO_END)
        self.queue_time = Histogram(metrics.QUEUE_TIME)
        self.prefill_time = Histogram(metrics.PREFILL_TIME)
        self.decode_time = Histogram(metrics.DECODE_TIME)
        self.inference_time = Histogram(metrics.INFERENCE_TIME)
        self.token_time = Histogram(metrics.TOKEN_TIME)
        self.request_prompt = Histogram(metrics.REQUEST_PROMPT)
        self.request_output = Histogram(metrics.REQUEST_OUTPUT)
        self.request_max_tokens = Histogram(metrics.REQUEST_MAX_TOKENS)
        self.step_tokens = Histogram(metrics.STEP_TOKENS)
        self.attempts = Histogram(metrics.ATTEMPTS)
        self.publish_time = Histogram(metrics.PUBLISH_TIME)
        self.claim_time = Histogram(metrics.CLAIM_TIME)
        self.num_published = 0
        self.num_fences_lost = 0
        self.num_ended: Counter[FinishReason] = Counter()
        self._gaps: defaultdict[float, int] = defaultdict(int)  # of this step: seconds, how many
        self._num_computed = 0  # tokens that the engine had computed by the last step
        self._contribution = Contribution()

    def note_output(self, held: PreparedRequest, at: float) -> None:
        """Tokens of a request that a step gave at `at`, `time.monotonic()` in seconds."""
        last = held.last_token_at
        if last is None:
            self._note_first_token(held, at)
        else:
            self._gaps[last] += 1  # most of a batch had their last token in the same step
        held.last_token_at = at

    def note_step(self, step: StepOutput) -> None:
        """A step whose outputs have all been noted."""
        for last, count in self._gaps.items():
            self.between_tokens.add(step.ended_at - last, count)
        self._gaps.clear()
        stats = step.stats
        num_computed = stats.prompt_tokens + stats.generation_tokens + stats.recomputed_tokens
        if num_computed > self._num_computed:
            self.step_tokens.add(num_computed - self._num_computed)
            self._num_computed = num_computed

    def note_publish(self, num_rows: int, seconds: float) -> None:
        """A round trip that sent events."""
        self.num_published += num_rows
        self.publish_time.add(seconds)

    def note_end(self, reason: FinishReason, held: PreparedRequest | None = None) -> None:
        """A request of this worker got its last event; of one it held, how it fared."""
        self._contribution.finished += 1
        self.num_ended[reason] += 1
        stats = held.stats if held is not None else None
        if held is None or stats is None:
            return
        self.end_to_end.add(
            max(0.0, held.server_ms(time.monotonic()) - held.claim.enqueued_at_ms) / 1000
        )
        self.prefill_time.add(stats.prompt_ms / 1000)
        self.decode_time.add(stats.generation_ms / 1000)
        self.inference_time.add((stats.prompt_ms + stats.generation_ms) / 1000)
        if stats.tokens_per_second:  # not of a single token
            self.token_time.add(1 / stats.tokens_per_second)
        self.request_prompt.add(held.num_prompt_tokens)
        self.request_output.add(held.num_emitted)
        self.request_max_tokens.add(held.engine_request.max_tokens)
        self.attempts.add(held.claim.attempt)

    def take_contribution(self) -> Contribution:
        """What came since the last call, for the queue's statistics."""
        taken, self._contribution = self._contribution, Contribution()
        return taken

    def _note_first_token(self, held: PreparedRequest, at: float) -> None:
        if held.engine_request.output_token_ids:
            return  # an earlier attempt had it
        enqueued_at = held.claim.enqueued_at_ms
        first_token_ms = max(0, held.server_ms(at) - enqueued_at)
        queue_ms = first_token_ms
        if held.timing is not None and held.timing.scheduled_at is not None:
            queue_ms = max(0, held.server_ms(held.timing.scheduled_at) - enqueued_at)
        self.first_token.add(first_token_ms / 1000)
        self.queue_time.add(queue_ms / 1000)
        part = self._contribution
        if len(part.first_token_ms) < _MAX_TIMES:
            part.first_token_ms.append(first_token_ms)
            part.queue_ms.append(queue_ms)
