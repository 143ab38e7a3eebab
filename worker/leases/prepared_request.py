"""A prepared request, what it has emitted, and how rows are made of that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.events import (
    ErrorInfo,
    Stats,
    TokenLogprob,
    Usage,
    embedding_json,
    result_json,
    stop_reason_json,
    token_event_json,
)
from promptq.shared.protocol.request import FinishReason, Request
from promptq.shared.protocol.rows import Row
from promptq.worker.engine.api.messages import EngineRequest, SequenceTiming
from promptq.worker.text.detokenizer import TextStream
from promptq.worker.text.output_marks import ReasoningTokens


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """What preparing a claim gives, and what has come of the request since.

    `token_ids`, `texts` and `logprobs` are what all attempts emitted. `engine_request` goes to the
    engine.
    """

    claim: Claim
    request: Request
    engine_request: EngineRequest
    text: TextStream
    token_ids: list[int]
    texts: list[str]
    logprobs: list[TokenLogprob]
    prompt_json: str = ""
    """What the first event tells of the prompt's tokens, as JSON; empty if they are not wanted, and
    until they are known."""
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """The stop strings that are tokens."""
    reasoning: ReasoningTokens | None = None
    """Counts the tokens of reasoning; None if the output has none."""
    resumed_inexactly: bool = False
    """Whether this attempt may continue with other tokens than the first would have given."""
    timing: SequenceTiming | None = None
    stats: Stats | None = None
    """How long things took and how often; set with the last row."""
    error: ErrorInfo | None = None
    """Why the request failed, if its last row says so."""
    last_token_at: float | None = None
    """When the last token of this attempt came; `time.monotonic()` in seconds."""
    rows: list[Row] = field(default_factory=list)
    """The rows of this attempt in order. They are sent again if the server loses some."""
    unsent: list[Row] = field(default_factory=list)
    """Of these rows, the one with what the request itself gave of its output. It goes with the next
    row, as a request that waits here has not begun."""

    @property
    def request_id(self) -> str:
        return self.claim.request_id

    @property
    def sequence_id(self) -> int:
        return self.engine_request.sequence_id

    @property
    def priority(self) -> int:
        return self.engine_request.priority

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.engine_request.prompt_token_ids)

    @property
    def kv_need(self) -> int:
        """How many KV tokens it is counted with: what was expected, or what it has if that is
        more."""
        return max(self.claim.cost, self.num_prompt_tokens + self.num_emitted)

    @property
    def is_at_end(self) -> bool:
        """Whether only the last event is missing: earlier attempts generated the whole output, or
        nothing is to be generated."""
        return (
            self.request.tokenize
            or self.num_emitted >= self.engine_request.max_tokens
            or self.is_stopped
        )

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found or the grammar is complete. Only used before it runs."""
        grammar = self.engine_request.grammar
        return self.text.stopped or (grammar is not None and grammar.is_complete)

    def with_unsent(self, row: Row) -> list[Row]:
        """The row, behind those that were to go with it."""
        unsent, self.unsent = self.unsent, []
        return [*unsent, row]

    def rows_until(self, row: Row) -> list[Row]:
        """All rows of the log up to this one, with those of earlier attempts."""
        claim = self.claim
        earlier = [Row.of(claim.request_id, claim.fence, event) for event in claim.events]
        return [*earlier, *(it for it in self.rows if it.start < row.start), row]

    def next_row(
        self,
        token_ids: list[int],
        text: str,
        logprobs: list[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
        error: ErrorInfo | None = None,
        embedding: str | None = None,
    ) -> Row:
        """The row that sends these tokens, and ends the request if there is a finish reason.

        Nothing is noted of a row that cannot be made.
        """
        claim, index = self.claim, self.num_emitted
        num_emitted = index + len(token_ids)
        more = self.prompt_json if index == 0 else ""
        if finish_reason is None:
            event_json = token_event_json(
                index, token_ids, text, logprobs, claim.attempt, more=more
            )
            row = Row(claim.request_id, claim.fence, index, num_emitted, event_json)
            self.rows.append(row)
        else:
            whole = "".join((*self.texts, text))
            all_ids = [*self.token_ids, *token_ids]
            usage = Usage(
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=num_emitted,
                cached_tokens=self.timing.cached_tokens if self.timing else 0,
                reasoning_tokens=self.reasoning.count(all_ids, whole) if self.reasoning else None,
            )
            self.stats, self.error = self._stats(num_emitted), error
            told, stats = usage.to_json(), self.stats.to_json()
            failure = None if error is None else error.to_json()
            more += f',"usage":{told},"stats":{stats}'
            if failure is not None:
                more += f',"error":{failure}'
            own = embedding_json(embedding)
            if finish_reason is FinishReason.STOP:
                last = self.stop_tokens.get(all_ids[-1]) if all_ids else None
                own += stop_reason_json(self.text.stop_string or last)
            more += own
            event_json = token_event_json(
                index,
                token_ids,
                text,
                logprobs,
                claim.attempt,
                f'"{finish_reason.value}"',
                more,
            )
            result = result_json(
                whole,
                all_ids,
                [*self.logprobs, *(logprobs or ())] or None,
                finish_reason,
                told,
                stats,
                failure or "null",
                self.prompt_json + own,
            )
            row = Row(
                claim.request_id, claim.fence, index, num_emitted, event_json, finish_reason, result
            )
        self.token_ids += token_ids
        self.texts.append(text)
        self.logprobs += logprobs or ()
        return row

    def _stats(self, num_emitted: int) -> Stats:
        now = time.monotonic()
        timing = self.timing or SequenceTiming()
        scheduled_at = timing.scheduled_at or now
        first_token_at = timing.first_token_at or now
        waited_ms = self.claim.claimed_at_ms - self.claim.enqueued_at_ms
        num_new = num_emitted - len(self.engine_request.output_token_ids)
        seconds = now - first_token_at
        return Stats(
            queue_ms=max(0.0, waited_ms + (scheduled_at - self.claim.received_at) * 1000),
            prompt_ms=(first_token_at - scheduled_at) * 1000,
            generation_ms=seconds * 1000,
            tokens_per_second=(num_new - 1) / seconds if num_new > 1 and seconds > 0 else 0.0,
            attempts=self.claim.attempt,
            preemptions=timing.preemptions,
            recomputed_tokens=timing.recomputed_tokens,
            preempted_at=[*map(self.claim.server_ms, timing.preempted_at)] or None,
            resumed_at=[*map(self.claim.server_ms, timing.resumed_at)] or None,
            resumed_inexactly=self.resumed_inexactly,
        )
