"""Prepared requests with their output so far, and the rows (events for Redis) of the output."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Claim
from promptq.shared.protocol.events import (
    ErrorInfo,
    Result,
    Stats,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    Usage,
    prompt_json,
    result_json,
    texts_json,
    token_event_json,
)
from promptq.shared.protocol.request import Embed, FinishReason, Request
from promptq.shared.protocol.rows import Row
from promptq.shared.runtime.logs import get_logger
from promptq.worker.engine.api.messages import (
    EngineRequest,
    PromptLogprobs,
    SequenceOutput,
    SequenceTiming,
)
from promptq.worker.text.detokenizer import REPLACEMENT, TextStream
from promptq.worker.text.output_marks import ReasoningTokens
from promptq.worker.text.tokenizer import Tokenizer

_SHORTEST = 1e-12  # as in torch's `normalize`


@dataclass(slots=True, eq=False)
class PreparedRequest:
    """A request after its preparation, with its output so far.

    `token_ids`, `texts` and `logprobs` have the output of all attempts. The worker passes
    `engine_request` to the engine.
    """

    claim: Claim
    request: Request
    engine_request: EngineRequest
    text: TextStream
    token_ids: list[int]
    texts: list[str]
    logprobs: list[TokenLogprob]
    prompt_json: str = ""
    """The first event's fields about the prompt's tokens, as JSON. Empty if the request does not
    want these fields, or if they are not known yet."""
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """Maps token ids to stop strings, for stop strings that are one token."""
    reasoning: ReasoningTokens | None = None
    """Counts the tokens of reasoning; None if the output has no reasoning."""
    resumed_inexactly: bool = False
    """Whether this attempt may generate other tokens than an uninterrupted attempt would."""
    timing: SequenceTiming | None = None
    stats: Stats | None = None
    """Times and counts of the request; set with the last row."""
    error: ErrorInfo | None = None
    """The error that the last row reports; None if the request has not failed."""
    last_token_at: float | None = None
    """Time of this attempt's latest token, in seconds of `time.monotonic()`."""
    rows: list[Row] = field(default_factory=list)
    """The rows of this attempt, in order. The publisher sends them again if Redis loses some."""
    unsent: list[Row] = field(default_factory=list)
    """Has the row with the output prefix until the publisher sends this row together with the first
    generated tokens. Before these tokens, the output has not begun."""

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
        """Number of tokens in the prompt: an estimate until an engine has read its pictures."""
        reported = self.timing.prompt_tokens if self.timing else None
        return self.engine_request.num_prompt_tokens if reported is None else reported

    @property
    def is_length_known(self) -> bool:
        """Whether `num_prompt_tokens` is exact."""
        has_pictures = bool(self.engine_request.pictures)
        return not has_pictures or (self.timing is not None and bool(self.timing.prompt_tokens))

    @property
    def kv_need(self) -> int:
        """Expected number of tokens in the KV cache, at least the current number."""
        return max(self.claim.cost, self.num_prompt_tokens + len(self.token_ids))

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left to generate: earlier attempts generated the whole output, or the
        request wants only the tokens of the prompt."""
        return (
            self.request.tokenize
            or self.num_emitted >= self.engine_request.max_tokens
            or self.is_stopped
        )

    @property
    def is_stopped(self) -> bool:
        """Whether the output so far contains a stop string or completes the grammar."""
        grammar = self.engine_request.grammar
        return self.text.stopped or (grammar is not None and grammar.is_complete)

    def rows_until(self, row: Row) -> list[Row]:
        """Returns the rows of all attempts at the request, up to and including `row`."""
        claim = self.claim
        earlier = [Row.of(claim.request_id, claim.fence, event) for event in claim.events]
        return [*earlier, *(sent for sent in self.rows if sent.start < row.start), row]

    def next_row(
        self,
        token_ids: list[int],
        text: str,
        logprobs: list[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
        error: ErrorInfo | None = None,
        embedding: str | None = None,
    ) -> Row:
        """Returns the next row, and adds it to the output. Only the last row has a finish reason.

        If the row cannot be built, the request does not change.
        """
        claim, index = self.claim, self.num_emitted
        num_emitted = index + len(token_ids)
        more = self.prompt_json if index == 0 else ""
        reason_json, result = "null", ""
        if finish_reason is not None:
            whole = "".join((*self.texts, text))
            all_ids = [*self.token_ids, *token_ids]
            usage = Usage(
                prompt_tokens=self.num_prompt_tokens,
                completion_tokens=num_emitted,
                cached_tokens=self.timing.cached_tokens if self.timing else 0,
                reasoning_tokens=self.reasoning.count(all_ids, whole) if self.reasoning else None,
            )
            self.stats, self.error = self._stats(num_emitted), error
            used, stats = usage.to_json(), self.stats.to_json()
            failure = None if error is None else error.to_json()
            more += f',"usage":{used},"stats":{stats}'
            if failure is not None:
                more += f',"error":{failure}'
            stop_reason = None
            if finish_reason is FinishReason.STOP:
                last = self.stop_tokens.get(all_ids[-1]) if all_ids else None
                stop_reason = self.text.stop_string or last
            last_part = texts_json(embedding=embedding, stop_reason=stop_reason)
            more += last_part
            reason_json = f'"{finish_reason.value}"'
            result = result_json(
                whole,
                all_ids,
                [*self.logprobs, *(logprobs or ())] or None,
                finish_reason,
                used,
                stats,
                failure or "null",
                self.prompt_json + last_part,
            )
        event_json = token_event_json(
            index, token_ids, text, logprobs, claim.attempt, reason_json, more
        )
        reason = finish_reason or ""
        row = Row(claim.request_id, claim.fence, index, num_emitted, event_json, reason, result)
        if finish_reason is None:
            self.rows.append(row)
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


class RowBuilder:
    """Builds the rows of requests. `tokenizer` provides the text of tokens in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._log = get_logger()

    def row(self, prepared: PreparedRequest, output: SequenceOutput) -> Row:
        """Returns the row for an output of a running request.

        If the row cannot be built, returns a row without tokens that ends the request with an
        error.
        """
        try:
            return self._row(prepared, output)
        except Exception as error:  # one failure must not stop other requests
            self._log.exception("a request's output failed", request_id=prepared.request_id)
            reason = ErrorInfo(type="internal_error", message=f"its output failed: {error}")
            return prepared.next_row([], "", finish_reason=FinishReason.ERROR, error=reason)

    def refusal(self, claim: Claim, error: InvalidRequestError) -> Row:
        """Returns the last row of a request that could not be prepared."""
        event = TokenEvent(
            index=claim.num_logged,
            token_ids=[],
            text="",
            finish_reason=FinishReason.ERROR,
            attempt=claim.attempt,
            usage=Usage(completion_tokens=claim.num_logged),
            error=ErrorInfo(type=error.error_type, message=str(error), code=error.code),
        )
        result = Result.fold([*claim.events, event]).to_json()
        self._log.debug("refused", request_id=claim.request_id, error=str(error))
        return Row.of(claim.request_id, claim.fence, event, result)

    def completion(self, prepared: PreparedRequest) -> Row:
        """Returns the last row of a request that needs no engine (`is_at_end`)."""
        if prepared.request.tokenize:
            token_ids = prepared.engine_request.prompt_token_ids
            prepared.prompt_json = prompt_json(
                prompt_texts(self._tokenizer, token_ids), token_ids=token_ids
            )
            return prepared.next_row([], "", finish_reason=FinishReason.STOP)
        reason = FinishReason.STOP if prepared.is_stopped else FinishReason.LENGTH
        return prepared.next_row([], prepared.text.flush(), finish_reason=reason)

    def _row(self, prepared: PreparedRequest, output: SequenceOutput) -> Row:
        text, token_ids, reason, stream = "", [], output.finish_reason, prepared.text
        if reason is FinishReason.ERROR:
            error = self._error_of(prepared, output)
            return prepared.next_row([], stream.flush(), finish_reason=reason, error=error)
        if output.embedding is not None:
            vector = encoded(output.embedding, prepared.request.embed or Embed())
            return prepared.next_row([], "", finish_reason=reason, embedding=vector)
        for token_id in output.token_ids:
            token_ids.append(token_id)
            is_last = reason is FinishReason.STOP and len(token_ids) == len(output.token_ids)
            # An end token is not text.
            if not (is_last and token_id in prepared.engine_request.end_token_ids):
                text += stream.push(token_id)
            if stream.stopped:
                break
        if stream.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text += stream.flush()
        logprobs = output.logprobs[: len(token_ids)] if output.logprobs is not None else None
        self._name_tokens(logprobs or ())
        if output.prompt_logprobs is not None:
            prompt = prepared.engine_request.prompt_token_ids
            of_prompt = list(_prompt_logprobs(prompt, output.prompt_logprobs))
            self._name_tokens(of_prompt)
            texts = prompt_texts(self._tokenizer, prompt)
            prepared.prompt_json = prompt_json(texts, [None, *of_prompt])
        return prepared.next_row(token_ids, text, logprobs, reason)

    def _error_of(self, prepared: PreparedRequest, output: SequenceOutput) -> ErrorInfo:
        reason = output.error or "the engine failed it"
        if output.is_refused:
            field, kind = prepared.request.field_that_bounds, "unsupported"
            if prepared.engine_request.pictures:
                field, kind = "messages", "invalid_request"
            elif prepared.engine_request.pair:
                field, kind = "prompt", "invalid_request"
            return ErrorInfo(type=kind, message=f"{field}: {reason}")
        self._log.error("the engine failed", request_id=prepared.request_id, error=output.error)
        return ErrorInfo(type="internal_error", message=reason)

    def _name_tokens(self, logprobs: Sequence[TokenLogprob]) -> None:
        for chosen in logprobs:
            chosen.token = self._tokenizer.token_text(chosen.token_id)
            for other in chosen.top or ():
                other.token = self._tokenizer.token_text(other.token_id)


def _prompt_logprobs(
    token_ids: Sequence[int], pieces: Sequence[PromptLogprobs]
) -> Iterator[TokenLogprob]:
    following = iter(token_ids[1:])
    for piece in pieces:
        columns = (piece.logprobs, piece.ranks, piece.top_ids, piece.top_logprobs)
        for logprob, rank, top_ids, top in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            likeliest = [
                TopLogprob(token_id=token_id, logprob=each)
                for token_id, each in zip(top_ids, top, strict=True)
            ]
            yield TokenLogprob(
                token_id=next(following), logprob=logprob, rank=rank, top=likeliest or None
            )


def prompt_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Returns the text of each token of a prompt. The joined texts are the prompt. The text of a
    special token is the token's name. If several tokens form one character, the last of these
    tokens has the whole character as its text, and the others have ''."""
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    for is_part, run in groupby(range(len(texts)), lambda place: REPLACEMENT in texts[place]):
        if is_part:
            places = [*run]
            whole = tokenizer.decode([token_ids[place] for place in places])
            for place in places:
                texts[place] = ""
            texts[places[-1]] = whole
    return texts


def encoded(vector: npt.NDArray[np.float32], embed: Embed) -> str:
    """Returns the vector as base64 of little-endian float32, cut to `embed.dimensions` numbers. If
    `embed.normalize` is set, scales the vector to length 1, unless the vector is a score (a request
    with `embed.query`)."""
    numbers = vector[: embed.dimensions].astype(np.float64)
    if embed.normalize and embed.query is None:
        numbers /= max(float(np.linalg.norm(numbers)), _SHORTEST)
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode("ascii")
