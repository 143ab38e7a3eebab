"""The queue's input: a request, and the ways in which it may end. Its JSON form is public.

Field names and ranges follow the OpenAI API and vLLM's SamplingParams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.keys import NAME, NAME_IN_WORDS
from promptq.shared.protocol.messages import normalised
from promptq.shared.protocol.output_format import Output, check_tools, wanted_output
from promptq.shared.protocol.pictures import Picture, pictures_of
from promptq.shared.protocol.urgency import WINDOW, WINDOW_IN_WORDS, priority_of, window_ms

PROTOCOL_VERSION = 1
MAX_PRIORITY = 1000
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
MAX_MS = 2**52
"""The longest deadline or delay in milliseconds (140,000 years). A float, such as a request's score
in Redis, is exact up to this number."""

MAX_MESSAGES = 4096
MAX_LOGIT_BIAS = 1024
MAX_SESSION_CHARS = 128
MAX_PROMPT_LOGPROBS = 32_768
"""The most log-probabilities of one prompt: its tokens times (`prompt_logprobs` + 1). One event has
all of them, at about 75 bytes of JSON each. While a process writes or reads such an event, its
other streams wait for some tenths of a second."""
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORDS_CHARS = 16_384
"""The most characters of all bad words of a request together."""
MAX_STOP_CHARS = 4096
MAX_STOPS_CHARS = 16_384
"""The most characters of all stop strings of a request together."""

TEMPLATE_CALL_ARGUMENTS = frozenset(
    {
        *("self", "conversation", "conversations", "messages", "tools", "documents"),
        *("chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "kwargs", "additional_special_tokens", "extra_special_tokens"),
        *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
    }
)
"""Names that a request may not set as variables of a chat template, because they are parameters of
the function that renders it. With `chat_template`, for example, a client could run a program."""

_TOKEN_ID = re.compile("[0-9]{1,10}")
_HTTP_URL = "^https?://"
_PATTERNS_IN_WORDS = {
    NAME: NAME_IN_WORDS,
    WINDOW: WINDOW_IN_WORDS,
    _HTTP_URL: "a URL that begins with http:// or https://",
}

_LONGEST_SHOWN = 80  # characters of a wrong value in an error message

_OF_CHATS = ("messages", "tools", "tool_choice", "chat_template_kwargs")

Durability = Literal["replicated"]
"""`replicated`: when enqueueing returns, all connected replicas have the request."""

Pooling = Literal["last", "mean"]
"""How a prompt becomes a vector: the last token's final hidden state, or all tokens' mean."""

TokenId = Annotated[int, Field(ge=0)]

# Only the first error is reported: to collect a long list's errors takes seconds and gigabytes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Words = Annotated[list[Word], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class FinishReason(StrEnum):
    """Why a request ended. Only the request's last event has a finish reason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class RequestState(StrEnum):
    """State of a request: `waiting` or `active` until its end, then a state that `is_final`."""

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


class SamplingParams(BaseModel):
    """Parameters for choosing tokens and for stopping, named as in OpenAI's API and vLLM."""

    # Otherwise the parser caches up to 16,384 short texts, among them prompts.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, cache_strings="keys"
    )

    max_tokens: int | None = Field(None, ge=1, description="left out: up to the model's length")
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, description="0 or -1: all tokens")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="token id (as text, as in JSON) to bias"
    )
    bad_words: Words | None = Field(None, max_length=256)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = Field(None, max_length=256)
    ignore_eos: bool = False
    logprobs: int | None = Field(
        None, ge=0, le=20, description="report the chosen token and this many of the likeliest"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report each token of the prompt and, at its position, this many of the"
        " likeliest",
    )
    response_format: dict[str, Any] | None = Field(
        None, description="of type text, json_object, json_schema, regex or choice"
    )
    speculative_tokens: int | None = Field(
        None, ge=0, le=64, description="most tokens drafted a step; left out: the worker's setting"
    )

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if any(not text for text in strings):
            raise ValueError("an empty stop string would stop at once")
        if len(strings) > 64:
            raise ValueError(f"{len(strings)} stop strings are more than the 64 allowed")
        if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARS:
            raise ValueError(
                f"a stop string of {longest} characters is longer than the {MAX_STOP_CHARS} allowed"
            )
        _check_sum("stop strings", strings, MAX_STOPS_CHARS)
        return stop

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, words: list[str] | None) -> list[str] | None:
        _check_sum("bad words", words or [], MAX_BAD_WORDS_CHARS)
        return words

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, bias: Any) -> Any:
        """Returns a valid logit bias. Raises ValueError at the first error, unlike pydantic."""
        if not isinstance(bias, dict):
            return bias
        for token_id, value in bias.items():
            if not (isinstance(token_id, str) and _TOKEN_ID.fullmatch(token_id)):
                raise ValueError(f"key {str(token_id)[:80]!r} is not a token id")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and -100 <= value <= 100):
                raise ValueError(f"{token_id}: must be a number from -100 to 100")
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

    def is_set(self, name: str) -> bool:
        """Returns whether a field differs from its default. For `temperature`, returns whether the
        value is above 0, so that tokens are drawn."""
        value = getattr(self, name)
        return bool(value > 0.0 if name == "temperature" else value != getattr(NEUTRAL, name))

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is set, so that earlier tokens change the logits of later tokens."""
        return _penalties(self) != _NO_PENALTIES


NEUTRAL = SamplingParams()
"""Parameters with default values. In a request, a number that equals its default has no effect."""

_penalties = attrgetter("repetition_penalty", "presence_penalty", "frequency_penalty")
_NO_PENALTIES = _penalties(NEUTRAL)


class TraceContext(BaseModel):
    """The trace context of the span that enqueued the request, as in W3C Trace Context's headers.

    If a value is not valid, the request begins a new trace.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    traceparent: str = Field("", max_length=256)
    tracestate: str | None = Field(None, max_length=1024)

    @property
    def carrier(self) -> dict[str, str]:
        """The context as HTTP headers: a mapping from names to values."""
        headers = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in headers.items() if value}


class Embed(BaseModel):
    """Options of a request whose answer is a vector, computed from the prompt's hidden states."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)
    query: str | None = Field(
        None, min_length=1, description="the vector is one number: how well the prompt answers this"
    )

    @model_validator(mode="after")
    def _check_query_alone(self) -> Self:
        if self.query is not None and self != Embed.model_construct(query=self.query):
            raise ValueError("query: cannot be combined with other members")
        return self


class OutputPrefix(BaseModel):
    """Tokens with which the output begins: `token_ids`, then the tokens of `text`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: TokenIds = []
    text: str = Field("", description="tokenised by the worker, without special tokens")

    @model_validator(mode="after")
    def _check_is_some(self) -> Self:
        if not self.token_ids and not self.text:
            raise ValueError("has neither token_ids nor text, so leave it out")
        return self


_MEMBERS = frozenset({*Embed.model_fields, *OutputPrefix.model_fields, *TraceContext.model_fields})
"""Field names of objects inside a request. After a request's field, error messages show only these
parts of pydantic's path."""


class Request(SamplingParams):
    """A request's payload.

    Exactly one of `prompt` (text or token ids) and `messages` is set. `deadline_ms` is the time
    from enqueueing in milliseconds. `service_tier` sets `priority`, and is then None. Within a
    protocol version, an unknown field is an error that names the field.
    """

    version: int = Field(PROTOCOL_VERSION, ge=1)
    model: str | None = None
    prompt: str | TokenIds | None = None
    messages: Objects | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: Objects | None = Field(None, max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="lower runs sooner")
    service_tier: str | None = Field(
        None, max_length=64, description="`flex`, `default` or `priority`: sets `priority`"
    )
    deadline_ms: int | None = Field(None, ge=1, le=MAX_MS)
    completion_window: str | None = Field(
        None,
        pattern=WINDOW,
        description="such as `2h` or `90m`: sets `deadline_ms`; the earliest deadline runs first",
    )
    deadline_policy: Literal["refuse"] | None = Field(
        None, description="`refuse`: refuse the request if it will probably miss its deadline"
    )
    expected_tokens: int | None = Field(
        None,
        ge=0,
        description="guess of the number of output tokens, for a queue with `shortest_first_ms`",
    )
    tenant: str | None = Field(None, pattern=NAME)
    idempotency_key: str | None = Field(None, min_length=1, max_length=200)
    cache_salt: str | None = Field(None, max_length=200)
    session: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SESSION_CHARS,
        exclude=True,  # only clients read it, and earlier workers would refuse it
        description="name of a conversation, whose next request may find its beginning cached",
    )
    metadata: dict[str, Any] | None = None
    webhook_url: str | None = Field(None, pattern=_HTTP_URL, max_length=2048)
    trace_context: TraceContext | None = None
    resume: Literal["exact_only"] | None = Field(
        None,
        description="`exact_only`: the request ends with an error if a later attempt cannot"
        " continue with exactly the tokens of an uninterrupted attempt",
    )
    embed: Embed | None = None
    tokenize: bool = Field(
        False, description="report the tokens of the prompt or chat, and generate nothing"
    )
    output_prefix: OutputPrefix | None = Field(
        None, description="beginning of the output, which the model continues"
    )

    @cached_property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures in the messages, in order."""
        return pictures_of(self.messages or ())

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(TEMPLATE_CALL_ARGUMENTS.intersection(kwargs or ())):
            raise ValueError(
                f"{name!r} is not a variable of the chat template. It is an argument of the call"
                " that renders it, and a request may not set it"
            )
        return kwargs

    @model_validator(mode="after")
    def _set_urgency(self) -> Self:
        if self.service_tier is not None:
            if "priority" not in self.model_fields_set:
                self.priority = priority_of(self.service_tier)
            self.service_tier = None  # from here on, only the priority says it
        if self.completion_window is not None:
            self.deadline_ms = min(self.deadline_ms or MAX_MS, window_ms(self.completion_window))
        if self.deadline_policy is not None and self.deadline_ms is None:
            raise ValueError("deadline_policy: needs deadline_ms or completion_window")
        return self

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.embed is not None:
            self._check_alone("embed", _OF_CHATS)
        if self.tokenize:
            self._check_alone("tokenize", ("embed",))
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages is needed")
        if self.prompt == []:
            raise ValueError("prompt: has no tokens, so there is nothing to continue")
        if self.prompt == "" and self.embed is not None:
            raise ValueError("prompt: is empty, so there is nothing to embed")
        if self.embed is not None and self.embed.query and not isinstance(self.prompt, str):
            raise ValueError("prompt: must be a text, because embed has a query")
        if self.messages is not None:
            self.messages = normalised(self.messages)
            if self.pictures and (self.tokenize or self.prompt_logprobs is not None):
                field = "tokenize" if self.tokenize else "prompt_logprobs"
                raise ValueError(
                    f"messages: pictures cannot be combined with {field}: only the inference server"
                    " counts their tokens"
                )
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            field = "tools" if self.tools else "chat_template_kwargs"
            raise ValueError(f"{field}: needs messages, and there is a prompt")
        check_tools(self.tools or ())
        if self.output_prefix is not None and self.prompt_logprobs is not None:
            raise ValueError("output_prefix: cannot be combined with prompt_logprobs")
        _ = self.wanted_output  # raises if it is not well-formed
        return self

    def _check_alone(self, kind: str, others: Sequence[str]) -> None:
        """Raises ValueError if a field is set that has no meaning beside the field `kind`: a
        sampling parameter, `output_prefix`, or one of `others`."""
        for name in (*SamplingParams.model_fields, *others, "output_prefix"):
            if getattr(self, name) != Request.model_fields[name].default:
                raise ValueError(f"{name}: has no meaning with {kind}, which generates nothing")

    @property
    def wanted_output(self) -> Output | None:
        """The output that the request requires; None if any text is allowed."""
        return wanted_output(self.response_format, self.tools, self.tool_choice)

    @property
    def field_that_bounds(self) -> str:
        """The first field that limits which tokens may be chosen; empty if no field does."""
        if (wanted := self.wanted_output) is not None:
            return wanted.field
        return "bad_words" if self.bad_words else "logit_bias" if self.logit_bias else ""

    @classmethod
    def parse(cls, payload: str | bytes) -> Self:
        """Returns the request in a payload from the queue. Raises InvalidRequestError that names
        the first wrong field."""
        check_size(len(payload))
        try:
            fields = from_json(payload, cache_strings="keys")
        except ValueError as error:
            raise InvalidRequestError(f"payload: is not JSON: {error}", field="payload") from None
        if not isinstance(fields, dict):
            raise InvalidRequestError("payload: is not a JSON object", field="payload")
        return cls.build(fields)

    @classmethod
    def build(cls, fields: dict[str, Any]) -> Self:
        """Returns a request with these field values. Raises InvalidRequestError like `parse`."""
        known = cls.model_fields
        for name in fields:  # before pydantic, which would report all unknown fields
            if name not in known:
                raise _unknown_field(name)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise invalid_request(error) from None

    def to_payload(self) -> str:
        """Returns the JSON form, without fields that have their default value, and without
        `expected_tokens`, which no worker reads."""
        return self.__pydantic_serializer__.to_json(
            self, exclude={"expected_tokens"}, exclude_defaults=True
        ).decode()


def _check_sum(what: str, texts: list[str], most: int) -> None:
    if (length := sum(map(len, texts))) > most:
        raise ValueError(f"{length} characters of {what} are more than the {most} allowed in all")


def check_size(num_bytes: int) -> None:
    """Raises InvalidRequestError if a payload is larger than workers accept."""
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidRequestError(
            f"payload: {num_bytes} bytes are more than the {MAX_PAYLOAD_BYTES} allowed",
            field="payload",
        )


def invalid_request(error: ValidationError, known: Container[str] = ()) -> InvalidRequestError:
    """Returns the error for the first wrong field in pydantic's report, as one sentence. `known`
    has further correct names, besides the names of a request's fields."""
    first, *others = error.errors(include_url=False)
    for other in others:  # in a union, the client meant the member that fits the most
        if other["loc"][:1] == first["loc"][:1] and len(other["loc"]) > len(first["loc"]):
            first = other
    message = first["msg"].removeprefix("Value error, ")[:500]
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"payload: is not JSON: {message}", field="payload")
    if not first["loc"]:
        field = field_of(message) if ": " in message else "payload"
        named = message if ": " in message else f"payload: {message}"
        return InvalidRequestError(named, field=field)
    # A union reports its members as further locations ("prompt", "str"); the field comes first.
    field = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        unknown = (
            name
            for name in first["input"]
            if name not in Request.model_fields and name not in known
        )
        misspelt = get_close_matches(field, islice(unknown, 100), n=1)
        if misspelt:
            return _unknown_field(misspelt[0])
        return InvalidRequestError(f"{field}: is missing", field=field)
    if first["type"] == "extra_forbidden":
        *outer, name = map(str, first["loc"])
        return _unknown_field(name, within=".".join(outer))
    if (pattern := first.get("ctx", {}).get("pattern")) in _PATTERNS_IN_WORDS:
        message = f"must be {_PATTERNS_IN_WORDS[pattern]}"
    members = [str(part) for part in first["loc"][1:] if part in _MEMBERS]
    place = ": ".join((field, *members))
    return InvalidRequestError(f"{place}: {message}, got {_shown(first.get('input'))}", field=field)


def field_of(message: str) -> str:
    """Returns the field name at the beginning of a message, without a path inside the field."""
    return message.split(":", 1)[0].split("[", 1)[0]


def _shown(value: Any) -> str:
    """Returns the beginning of a value's JSON, without building the rest."""
    text = ""
    if isinstance(value, str):
        value = value[:_LONGEST_SHOWN]
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _LONGEST_SHOWN:
            return text[: _LONGEST_SHOWN - 3] + "..."
    return text


def _unknown_field(name: str, within: str = "") -> InvalidRequestError:
    field = name[:64]  # no field has a longer name
    if within:
        return InvalidRequestError(f"{within}: has no field {field!r}", field=within)
    meant = get_close_matches(field, Request.model_fields, n=1, cutoff=0.8)
    hint = f"; do you mean {meant[0]}?" if meant else ""
    return InvalidRequestError(f"{field}: is not a field of a request{hint}", field=field)


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """A holder, such as an API key, and its limit of tokens per minute. Workers count each output
    token towards this limit."""

    holder: str
    limit: int

    def __str__(self) -> str:
        """Returns the form that the request's hash stores."""
        return f"{self.limit} {self.holder}"


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The place where a fork branches off from another request: after `position` output tokens."""

    request_id: str
    position: int

    def __str__(self) -> str:
        """Returns the form that the request's hash stores."""
        return f"{self.position} {self.request_id}"


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to enqueue. `payload` is the request's JSON without `trace_context`. If `payload`
    is set, `request` needs only the fields that the queue reads, such as `priority`. `pictures` has
    the data URLs of the stored pictures that the payload names. `affinity` has the hashes
    that `promptq.producer.clients.affinity` computes."""

    request_id: str
    request: Request
    delay_ms: int = 0
    account: TokenAccount | None = None
    payload: bytes | memoryview | None = None
    forked_from: ForkPoint | None = None
    durability: Durability | None = None
    pictures: Mapping[str, str | bytes | memoryview] = field(default_factory=dict)
    affinity: str = ""

    def to_payload(self) -> str | bytes | memoryview:
        """Returns the payload as JSON, with the trace context."""
        if self.payload is None:
            return self.request.to_payload()
        context = self.request.trace_context
        if context is None:
            return self.payload
        traced = context.model_dump_json(exclude_defaults=True).encode()
        return b'%b,"trace_context":%b}' % (bytes(self.payload[:-1]), traced)
