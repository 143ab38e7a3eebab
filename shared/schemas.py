"""What crosses the queue: requests in, events out. The JSON form of each is public.

Field names and ranges follow the OpenAI API and vLLM's SamplingParams.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.errors import InvalidRequestError
from shared.output_format import Output, wanted_output

PROTOCOL_VERSION = 1
MAX_PRIORITY = 1000
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024

_LONGEST_NAME = 64
"""What no field's name exceeds, and no more of an unknown one is told."""

TokenId = Annotated[int, Field(ge=0)]


class FinishReason(StrEnum):
    """Why a request ended; only its last event has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"

    @property
    def state(self) -> RequestState:
        """The state that a request with this finish reason ends in."""
        return _STATE_AFTER[self]


class RequestState(StrEnum):
    """Where a request is in its life. A queue is left only for a state that `is_final`."""

    WAITING = "waiting"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"

    @property
    def is_final(self) -> bool:
        return self not in (RequestState.WAITING, RequestState.ACTIVE)


_STATE_AFTER = {
    FinishReason.STOP: RequestState.COMPLETED,
    FinishReason.LENGTH: RequestState.COMPLETED,
    FinishReason.CANCELLED: RequestState.CANCELLED,
    FinishReason.EXPIRED: RequestState.EXPIRED,
    FinishReason.ERROR: RequestState.FAILED,
}


class SamplingParams(BaseModel):
    """How tokens are chosen and when to stop."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1, description="None: up to the model's length")
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, description="0 or -1: all tokens")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, description="token id (as text, as in JSON) to bias"
    )
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=256)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=256)
    ignore_eos: bool = False
    logprobs: int | None = Field(
        None, ge=0, le=20, description="report the chosen token and this many of the likeliest"
    )
    response_format: dict[str, Any] | None = None
    speculative_tokens: int | None = Field(
        None, ge=0, le=64, description="most tokens drafted a step; None: the worker's setting"
    )

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if any(not text for text in strings):
            raise ValueError("an empty stop string would stop at once")
        if len(strings) > 64:
            raise ValueError(f"{len(strings)} stop strings are more than the 64 allowed")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token_id in bias or ():
            if not (token_id.isascii() and token_id.isdigit()):
                raise ValueError(f"key {token_id!r} is not a token id")
        return bias

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TraceContext(BaseModel):
    """Which span a request belongs to, as in the headers of W3C Trace Context.

    What is no such header's value is not refused: the request just begins a trace of its own.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    traceparent: str = Field("", max_length=256)
    tracestate: str | None = Field(None, max_length=1024)

    @property
    def carrier(self) -> dict[str, str]:
        """As headers."""
        found = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in found.items() if value}


class Request(SamplingParams):
    """A request's payload.

    Exactly one of `prompt` (text or token ids) and `messages` is set. `deadline_ms` counts from
    enqueueing. Within a protocol version unknown fields are refused by name.
    """

    version: int = Field(PROTOCOL_VERSION, ge=1)
    model: str | None = None
    prompt: str | list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="lower runs sooner")
    deadline_ms: int | None = Field(None, ge=1)
    tenant: str | None = Field(None, pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    idempotency_key: str | None = Field(None, min_length=1, max_length=200)
    cache_salt: str | None = Field(None, max_length=200)
    metadata: dict[str, Any] | None = None
    webhook_url: str | None = Field(None, pattern=r"^https?://", max_length=2048)
    trace_context: TraceContext | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages is needed")
        if self.prompt is not None and len(self.prompt) == 0:
            raise ValueError("prompt: is empty, and there is nothing to continue")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            field = "tools" if self.tools else "chat_template_kwargs"
            raise ValueError(f"{field}: goes with messages, not with prompt")
        _ = self.wanted_output  # raises if it is not well-formed
        return self

    @property
    def wanted_output(self) -> Output | None:
        """What the output must be; None for any text."""
        return wanted_output(self.response_format, self.tools, self.tool_choice)

    @classmethod
    def parse(cls, payload: str | bytes) -> Self:
        """Read a payload as it came from the queue.

        Raises InvalidRequestError naming the first field that is wrong.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidRequestError(
                f"payload: {len(payload)} bytes are more than the {MAX_PAYLOAD_BYTES} allowed",
                field="payload",
            )
        try:
            return cls.model_validate_json(payload)
        except ValidationError as error:
            raise invalid_request(error) from None

    @classmethod
    def build(cls, fields: dict[str, Any]) -> Self:
        """Make a request of Python values. Raises InvalidRequestError like `parse`."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_request(error) from None

    def to_payload(self) -> str:
        """The JSON form, without fields that were left at their default."""
        return self.model_dump_json(exclude_defaults=True)


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Turn pydantic's report into one sentence about the first wrong field."""
    first, *others = error.errors(include_url=False)
    for other in others:  # of a union's members, the one that got furthest is the one meant
        if other["loc"][:1] == first["loc"][:1] and len(other["loc"]) > len(first["loc"]):
            first = other
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"payload: is not JSON: {message}", field="payload")
    if not first["loc"]:
        field = message.split(":", 1)[0] if ": " in message else "payload"
        named = message if ": " in message else f"payload: {message}"
        return InvalidRequestError(named, field=field)
    # A union reports its members as further locations ("prompt", "str"); the field comes first.
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        field = field[:_LONGEST_NAME]
        meant = get_close_matches(field, Request.model_fields, n=1)
        hint = f"; do you mean {meant[0]}?" if meant else ""
        return InvalidRequestError(f"{field}: is not a field of a request{hint}", field=field)
    value = json.dumps(first.get("input"), default=str)
    shown = value if len(value) <= 80 else value[:77] + "..."
    return InvalidRequestError(f"{field}: {message}, got {shown}", field=field)


_quoted = json.encoder.encode_basestring
"""A text as JSON, in C where there is C; characters beyond ASCII stay as they are."""


def _numbers(values: list[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _array(items: Sequence[BaseModel] | None) -> str:
    return "null" if items is None else f"[{','.join(it.model_dump_json() for it in items)}]"


def token_event_json(
    index: int,
    token_ids: list[int],
    text: str,
    logprobs: Sequence[TokenLogprob] | None,
    attempt: int,
    finish_reason: str = "null",
) -> str:
    """A `TokenEvent` as JSON, without making one; `finish_reason` is JSON already.

    Written by hand, for there is one a token: json.dumps takes three times as long, and a model's
    own construction more than this.
    """
    numbers = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
    return (
        f'{{"index":{index},"token_ids":[{numbers}],"text":{_quoted(text)}'
        f',"logprobs":{_array(logprobs)}'
        f',"finish_reason":{finish_reason},"attempt":{attempt}}}'
    )


class _Wire(BaseModel):
    """Base of what workers send: unknown fields are kept out of the way, not refused."""

    model_config = ConfigDict(extra="ignore")


class TopLogprob(_Wire):
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float
    token: str | None = None


class TokenLogprob(_Wire):
    """Natural log-probability of the token that was chosen, before any sampling parameter.

    `rank` is 1 for the likeliest token; `top` holds the likeliest ones, null if none were asked.
    `token` is its text alone; bytes that are no whole character in it are U+FFFD.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[TopLogprob] | None = None
    token: str | None = None


class Usage(_Wire):
    """Token counts; `completion_tokens` are those that were emitted, over all attempts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @classmethod
    def of_samples(cls, usages: list[Usage]) -> Usage:
        """The usage of several samples of one prompt: the prompt counts once."""
        if not usages:
            return cls()
        return cls(
            prompt_tokens=max(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
        )


class Stats(_Wire):
    """How a request fared; all times in milliseconds, those of the last attempt but `queue_ms`."""

    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    generation_ms: float = 0.0
    tokens_per_second: float = 0.0
    attempts: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    preempted_at: list[int] | None = None
    """Unix milliseconds of the server, as `resumed_at`. Null instead of an empty list, which a
    script that folds the log could not tell from an empty object."""
    resumed_at: list[int] | None = None


class ErrorInfo(_Wire):
    """What went wrong: a stable `type` for programs, a sentence for people."""

    type: str
    message: str


class TokenEvent(_Wire):
    """One message of a request's stream. `index` counts the tokens that came before it."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    attempt: int = 0
    usage: Usage | None = None
    stats: Stats | None = None
    error: ErrorInfo | None = None

    @property
    def end(self) -> int:
        """How many tokens of the request there are after this event."""
        return self.index + len(self.token_ids)

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None

    def to_json(self) -> str:
        """The public JSON form; `usage`, `stats` and `error` only where they are set."""
        parts = [
            token_event_json(
                self.index,
                self.token_ids,
                self.text,
                self.logprobs,
                self.attempt,
                "null" if self.finish_reason is None else f'"{self.finish_reason.value}"',
            )[:-1]
        ]
        for name in ("usage", "stats", "error"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f',"{name}":{value.model_dump_json()}')
        return "".join(parts) + "}"


class Result(_Wire):
    """A finished request: its events, folded."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason
    usage: Usage
    stats: Stats | None = None
    error: ErrorInfo | None = None

    def to_json(self) -> str:
        """The JSON form, as it lies in the request's hash."""
        return "".join(
            (
                f'{{"text":{_quoted(self.text)},"token_ids":{_numbers(self.token_ids)}',
                f',"logprobs":{_array(self.logprobs)},"finish_reason":"{self.finish_reason.value}"',
                f',"usage":{self.usage.model_dump_json()}',
                f',"stats":{"null" if self.stats is None else self.stats.model_dump_json()}',
                f',"error":{"null" if self.error is None else self.error.model_dump_json()}}}',
            )
        )

    @classmethod
    def fold(cls, events: list[TokenEvent]) -> Result:
        """Fold a whole stream, its last event included, into one result."""
        last = events[-1]
        if last.finish_reason is None:
            raise ValueError("the stream has no last event yet")
        logprobs = [item for event in events for item in event.logprobs or ()]
        return cls(
            text="".join(event.text for event in events),
            token_ids=[token_id for event in events for token_id in event.token_ids],
            logprobs=logprobs or None,
            finish_reason=last.finish_reason,
            usage=last.usage or Usage(),
            stats=last.stats,
            error=last.error,
        )


class WorkerStats(_Wire):
    """A worker's heartbeat, flat as in its hash. Counts are totals since the worker started."""

    worker_id: str
    model: str = ""
    host: str = ""
    pid: int = 0
    state: str = "running"
    """`running`, or `draining` once it claims no more."""
    started_at_ms: int = 0
    heartbeat_at: int = 0
    """Server time in ms, set by the server."""
    device: str = ""
    dtype: str = ""
    max_num_seqs: int = 0
    num_running: int = 0
    num_waiting: int = 0
    """In the engine, without a slot yet."""
    num_prefetched: int = 0
    num_processed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    """Guesses at coming tokens that were computed along with decodes ..."""
    accepted_tokens: int = 0
    """... and those of them that were right."""
    num_preemptions: int = 0
    kv_tokens: int = 0
    kv_used_tokens: int = 0
    kv_bytes_per_token: int = 0
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    """Owned by some sequence ..."""
    kv_shared_blocks: int = 0
    """... and those of them that several own."""
    kv_free_blocks: int = 0
    """That can be taken: empty ones, and those that hold a prefix but have no owner ..."""
    kv_cached_blocks: int = 0
    """... which are these."""
    step_ms: float = 0.0
    """Median of the last steps."""
    tokens_per_second: float = 0.0
    """Generated tokens a second over the time in which the engine had work."""
    recent_tokens_per_second: float = 0.0
    """The same since the last heartbeat, busy or not."""
    mean_queue_ms: float = 0.0
    mean_prompt_ms: float = 0.0
    mean_generation_ms: float = 0.0
    peak_memory_bytes: int = 0
    start_up_seconds: float = 0.0
    start_up_stages: str = ""
    """Seconds of each stage: `weights=0.812 checking=1.204 ...`."""
