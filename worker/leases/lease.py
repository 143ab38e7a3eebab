"""A request that this worker holds, from its claim to its last event or its release."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Claim, Held, ModelIdentity
from promptq.shared.protocol.events import (
    ErrorInfo,
    Result,
    Stats,
    TokenEvent,
    TokenLogprob,
    Usage,
    token_event_json,
)
from promptq.shared.protocol.request import FinishReason, Request
from promptq.shared.protocol.rows import Row
from promptq.worker.engine.api.grammar import Grammar, GrammarError
from promptq.worker.engine.api.messages import EngineLimits, EngineRequest, SequenceTiming
from promptq.worker.text.detokenizer import TextStream
from promptq.worker.text.structured_output import Grammars
from promptq.worker.text.tokenizer import Tokenizer

_sequence_ids = itertools.count(1)


@dataclass(slots=True, eq=False)
class Lease:
    """What the parts of a worker know of one attempt at a request.

    `token_ids`, `texts` and `logprobs` are what was emitted, over all attempts. `engine_request` is
    what the engine gets.
    """

    claim: Claim
    request: Request
    engine_request: EngineRequest
    text: TextStream
    token_ids: list[int]
    texts: list[str]
    logprobs: list[TokenLogprob]
    claimed_at: float
    """`time.monotonic()` in seconds."""
    in_engine: bool = False
    ended: bool = False
    """Its last row is on the way, or it was lost: whatever the engine still sends is dropped."""
    timing: SequenceTiming | None = None
    stats: Stats | None = None
    """How it fared, once it has its last row."""
    error: ErrorInfo | None = None
    """Why it failed, where its last row says that it did."""
    last_token_at: float | None = None
    """When this attempt's last token came; `time.monotonic()` in seconds."""
    prompt_tokens_told: bool = False
    rows: list[Row] = field(default_factory=list)
    """Of this attempt, in order: should the server lose some, they are sent again."""

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
        """Tokens of KV it is counted with: what was expected, or what it has if that is more."""
        return max(self.claim.cost, self.num_prompt_tokens + self.num_emitted)

    @property
    def is_at_end(self) -> bool:
        """Whether earlier attempts emitted all it may have, only the last event being missing."""
        return self.num_emitted >= self.engine_request.max_tokens or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found or the output is complete. Before it is in the engine."""
        grammar = self.engine_request.grammar
        return self.text.stopped or (grammar is not None and grammar.is_complete)

    def as_held(self) -> Held:
        """What renews its lease; tells the prompt's exact length the first time."""
        told, self.prompt_tokens_told = self.prompt_tokens_told, True
        length = None if told else self.num_prompt_tokens
        return Held(self.request_id, self.claim.fence, length)

    @property
    def emitted(self) -> tuple[int, int, int, int]:
        """How far it is, for `take_back`."""
        return (len(self.token_ids), len(self.texts), len(self.logprobs), len(self.rows))

    def take_back(self, emitted: tuple[int, int, int, int]) -> None:
        """Undo what a row noted that could not be made."""
        parts: tuple[list[Any], ...] = (self.token_ids, self.texts, self.logprobs, self.rows)
        for part, length in zip(parts, emitted, strict=True):
            del part[length:]

    def rows_until(self, row: Row) -> list[Row]:
        """All rows of the log up to this one, those of earlier attempts too."""
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
    ) -> Row:
        """The row that sends these tokens, and ends the request if there is a finish reason."""
        index = len(self.token_ids)
        self.token_ids += token_ids
        if text:
            self.texts.append(text)
        if logprobs:
            self.logprobs += logprobs
        claim = self.claim
        if finish_reason is None:
            event_json = token_event_json(index, token_ids, text, logprobs, claim.attempt)
            row = Row(claim.request_id, claim.fence, index, len(self.token_ids), event_json)
            self.rows.append(row)
            return row
        self.ended = True
        usage = Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_emitted,
            cached_tokens=self.timing.cached_tokens if self.timing else 0,
        )
        self.stats, self.error = self._stats(), error
        event = TokenEvent(
            index=index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            attempt=claim.attempt,
            usage=usage,
            stats=self.stats,
            error=error,
        )
        result = Result(
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs or None,
            finish_reason=finish_reason,
            usage=usage,
            stats=self.stats,
            error=error,
        )
        return Row.of(claim.request_id, claim.fence, event, result.to_json())

    def _stats(self) -> Stats:
        now = time.monotonic()
        timing = self.timing or SequenceTiming()
        scheduled_at = timing.scheduled_at or now
        first_token_at = timing.first_token_at or now
        waited_ms = self.claim.claimed_at_ms - self.claim.enqueued_at_ms
        num_new = self.num_emitted - len(self.engine_request.output_token_ids)
        seconds = now - first_token_at
        return Stats(
            queue_ms=max(0.0, waited_ms + (scheduled_at - self.claimed_at) * 1000),
            prompt_ms=(first_token_at - scheduled_at) * 1000,
            generation_ms=seconds * 1000,
            tokens_per_second=(num_new - 1) / seconds if num_new > 1 and seconds > 0 else 0.0,
            attempts=self.claim.attempt,
            preemptions=timing.preemptions,
            recomputed_tokens=timing.recomputed_tokens,
            preempted_at=[*map(self.server_ms, timing.preempted_at)] or None,
            resumed_at=[*map(self.server_ms, timing.resumed_at)] or None,
        )

    def server_ms(self, at: float) -> int:
        """Unix milliseconds of the server for a `time.monotonic()` in seconds."""
        return self.claim.claimed_at_ms + round((at - self.claimed_at) * 1000)


@dataclass(frozen=True, slots=True)
class Preparation:
    """What turning a claim into a held request takes. `prepare` may run in any thread."""

    tokenizer: Tokenizer
    limits: EngineLimits
    model: ModelIdentity
    end_token_ids: frozenset[int]
    grammars: Grammars | None = None

    def prepare(self, claim: Claim) -> Lease:
        """Parse, tokenise, check, and rebuild what earlier attempts had reached.

        Raises InvalidRequestError naming the field that is wrong.
        """
        if claim.is_spoilt:
            raise InvalidRequestError("tokens: the log holds what is no event", field="tokens")
        request = Request.parse(claim.payload)
        self._check_served(request)
        prompt = self.tokenizer.encode_prompt(request)
        self._check_tokens(request, prompt)
        emitted = [token_id for event in claim.events for token_id in event.token_ids]
        room = self.limits.max_model_len - len(prompt)
        max_tokens = min(request.max_tokens or room, room)
        ends = frozenset(request.stop_token_ids or ())
        if not request.ignore_eos:
            ends |= self.end_token_ids
        text = TextStream(self.tokenizer.decode, prompt, request.stop_strings, request.min_tokens)
        text.replay(emitted, "".join(event.text for event in claim.events))
        return Lease(
            claim=claim,
            engine_request=EngineRequest(
                sequence_id=next(_sequence_ids),
                prompt_token_ids=prompt,
                params=request,
                seed=claim.seed if request.seed is None else request.seed,
                max_tokens=max_tokens,
                end_token_ids=ends,
                bad_token_sequences=self._bad_token_sequences(request, max_tokens),
                output_token_ids=emitted,
                priority=request.priority,
                order=claim.order,
                cache_salt=request.cache_salt or "",
                grammar=self._grammar(request, ends, emitted),
            ),
            text=text,
            token_ids=list(emitted),
            texts=[event.text for event in claim.events],
            logprobs=[item for event in claim.events for item in event.logprobs or ()],
            claimed_at=time.monotonic(),
            request=request,
        )

    def _check_served(self, request: Request) -> None:
        if request.model is not None and self.model.name and request.model != self.model.name:
            raise InvalidRequestError(
                f"model: this queue serves {self.model.name!r}, not {request.model!r}",
                field="model",
            )

    def _check_tokens(self, request: Request, prompt: list[int]) -> None:
        field_name = "prompt" if request.messages is None else "messages"
        if not prompt:
            raise InvalidRequestError(f"{field_name}: holds no tokens", field=field_name)
        longest = self.limits.max_model_len - 1
        if len(prompt) > longest:
            raise InvalidRequestError(
                f"{field_name}: {len(prompt)} tokens are more than the {longest} that this worker"
                f" can take and still answer (model length {self.limits.max_model_len})",
                field=field_name,
                code="context_length_exceeded",
            )
        named: list[tuple[str, list[int]]] = [(field_name, prompt)]
        if request.stop_token_ids:
            named.append(("stop_token_ids", request.stop_token_ids))
        if request.logit_bias:
            named.append(("logit_bias", [int(key) for key in request.logit_bias]))
        for name, token_ids in named:
            worst = max(token_ids)
            if worst >= self.limits.vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id {worst} is outside the vocabulary of"
                    f" {self.limits.vocab_size} tokens",
                    field=name,
                )

    def _grammar(
        self, request: Request, ends: frozenset[int], emitted: list[int]
    ) -> Grammar | None:
        wanted = request.wanted_output
        if wanted is None:
            return None
        if self.grammars is None:
            raise InvalidRequestError(
                f"{wanted.field}: this worker's engine chooses its tokens without regard to it",
                field=wanted.field,
                error_type="unsupported",
            )
        grammar = self.grammars.start(wanted, ends)
        try:
            for token_id in emitted:
                grammar.accept(token_id)
        except GrammarError as error:
            raise InvalidRequestError(
                f"{wanted.field}: what was emitted before does not fit: {error}",
                field=wanted.field,
                error_type="internal_error",
            ) from error
        return grammar

    def _bad_token_sequences(
        self, request: Request, max_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        """Those that an output of so many tokens has room for."""
        found = {
            tuple(tokens)
            for word in request.bad_words or ()
            for tokens in self.tokenizer.encode_word(word)
            if len(tokens) <= max_tokens
        }
        return tuple(sorted(found))
