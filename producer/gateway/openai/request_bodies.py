"""A call of /v1/completions or /v1/chat/completions: its body and headers, as requests.

Fields that an endpoint adds to those of a payload, or names differently, are described here. Other
fields of a body are fields of `promptq.shared.protocol.request.Request` and are checked there.
So a new field of a payload works over HTTP at once, and a misspelt field is refused by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from promptq.producer.clients.request_builder import Prompt
from promptq.producer.gateway.http.bodies import read_json
from promptq.producer.gateway.openai.reading.model_text import needed_of
from promptq.producer.gateway.openai.tolerated_fields import (
    FieldsWithoutEffect,
    FixedFields,
    in_our_words,
    warn_of,
)
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import (
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Objects,
    invalid_request,
)

MAX_CHOICES = 256
"""The most answers of one call: prompts times `n`."""

MAX_CALL_BYTES = 4 * MAX_PAYLOAD_BYTES
"""Most bytes of all payloads of one call. Each answer is a request with a whole payload."""

DEFAULT_MAX_TOKENS = 16
"""The default of /v1/completions, as in the OpenAI API."""

HEADERS = {
    "priority": "X-Priority",
    "deadline_ms": "X-Deadline-Ms",
    "detach": "X-Detach",
    "wait_for_worker": "X-Wait-For-Worker",
    "idempotency_key": "Idempotency-Key",
}
"""The headers that stand for a field of the body."""

_NUMBERS = {"priority", "deadline_ms"}
_SWITCHES = {"detach", "wait_for_worker"}
_WITHOUT_EFFECT = {*FieldsWithoutEffect.model_fields, "parallel_tool_calls"}
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

T = TypeVar("T", bound="BodyOptions")


def _known_options(given: Any) -> Any:
    """Refuse the first unknown name, as pydantic would report each."""
    for name in given if isinstance(given, dict) else ():
        if name not in _STREAM_OPTIONS:
            raise ValueError(f"{name[:80]!r} is not one of {', '.join(_STREAM_OPTIONS)}")
    return given


_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
StreamOptions = Annotated[dict[str, bool], BeforeValidator(_known_options)]


class BodyOptions(BaseModel):
    """What all endpoints that enqueue take beside a payload's fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="null or empty: that of the gateway's own queue")
    version: int = Field(1, ge=1, le=PROTOCOL_VERSION, description="version of the payload")
    wait_for_worker: bool = Field(True, description="false: 503 while no worker is alive")


class GeneratingOptions(BodyOptions):
    """What the endpoints that generate take, too."""

    stream: bool = Field(False, description="send tokens as they come, as server-sent events")
    detach: bool = Field(
        False, description="go on when the client leaves; it comes back for the rest"
    )


class CallOptions(GeneratingOptions, FieldsWithoutEffect, FixedFields):
    """What completions and chats take, too."""

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="how many answers each prompt gets")
    stream_options: StreamOptions | None = Field(
        None, description='{"include_usage": true}: a last chunk has the usage'
    )


class CompletionOptions(CallOptions):
    """The fields of /v1/completions."""

    prompt: str | list[Any] = Field(description="text or token ids, or a list of either")
    echo: bool = Field(
        False,
        description="begin the answer with the prompt, and with its logprobs if there are any",
    )
    suffix: Literal[""] | None = None


class ChatOptions(CallOptions):
    """The fields of /v1/chat/completions."""

    messages: Objects = Field(min_length=1)
    logprobs: bool = Field(False, description="report each token's log-probability")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="and for each, so many likeliest tokens"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="the same as max_tokens")
    reasoning_effort: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="the variable of that name in the model's chat template; `none` also sets"
        " `enable_thinking` to false",
    )
    parallel_tool_calls: bool | None = Field(None, description="accepted without effect")
    modalities: list[Literal["text"]] | None = Field(None, description="text alone is served")
    echo: Literal[False] | None = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One call. `fields` are those of a payload. For a chat, `prompts` is a single None.

    A call of /v1/responses or /v1/messages is a chat that is answered in another `form`. With
    `count`, its tokens are told alone.
    """

    is_chat: bool
    fields: dict[str, Any]
    prompts: list[Prompt | None]
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    """Whether no token is shown (`max_tokens: 0`). One is generated, since that ends the prompt."""
    shows_prompt_logprobs: bool = False
    detach: bool = False
    wait_for_worker: bool = True
    body_bytes: int = 0
    encoding_format: Literal["float", "base64"] | None = None
    """How vectors are written, for a call that asks for them; None: it asks for text."""
    form: Literal["", "embeddings", "response", "message", "count", "input_count"] = ""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def model(self) -> str | None:
        model: str | None = self.fields.get("model")
        return model

    def requests(self, completion_id: str) -> list[dict[str, Any]]:
        """Requests for `Client.enqueue_many`: one for each choice, prompt by prompt."""
        seed, key = self.fields.get("seed"), self.fields.get("idempotency_key")
        requests = []
        for index, request_id in enumerate(request_ids(completion_id, self.num_choices)):
            own: dict[str, Any] = {"request_id": request_id}
            if (prompt := self.prompts[index // self.n]) is not None:
                own["prompt"] = prompt
            if type(seed) is int and self.n > 1:  # other types are refused later
                own["seed"] = seed + index % self.n
            if key is not None and self.num_choices > 1:
                own["idempotency_key"] = f"{key}:{index}"
            requests.append({**self.fields, **own})
        return requests

    @property
    def num_bytes(self) -> int:
        """About how long all payloads of the call are together, by the size of its body."""
        return self.body_bytes * self.num_choices

    def for_answer(self) -> CompletionCall:
        """The call with only what its answer needs. That is little unless it echoes texts."""
        needed = ("model", "logprobs") + (("output_prefix",) if self.form == "message" else ())
        kept: dict[str, Any] = {it: self.fields[it] for it in needed if it in self.fields}
        kept |= needed_of(self.fields)
        prompts: list[Prompt | None] = [None] * len(self.prompts)
        if self.echo:
            prompts = [it if isinstance(it, str) else None for it in self.prompts]
        return replace(self, fields=kept, prompts=prompts)

    def with_fields(self, **fields: Any) -> CompletionCall:
        """The call with these fields of its payload set."""
        return replace(self, fields={**self.fields, **fields})

    def with_model_of(self, aliases: Mapping[str, str]) -> CompletionCall:
        """The call with the name of its model, if it has one of the model's further names."""
        name = aliases.get(self.model) if isinstance(self.model, str) else None
        return self if name is None else self.with_fields(model=name)

    def with_key_of(self, caller: str, tenant: str) -> CompletionCall:
        """The call with an idempotency key for one tenant, one caller and one shape of answer.

        Later the caller's name may belong to another tenant's API key. '' is a tenant, too.
        """
        key = self.fields.get("idempotency_key")
        if not isinstance(key, str):
            return self
        kind = self.form or self.is_chat
        own = f"{tenant}\n{caller}\n{kind} {len(self.prompts)} {self.n}\n{key}"
        hashed = hashlib.sha256(own.encode("utf-8", "surrogatepass")).hexdigest()
        return self.with_fields(idempotency_key=hashed)


def request_ids(completion_id: str, num_choices: int) -> list[str]:
    """The ids in the queue of a completion's choices."""
    if num_choices == 1:
        return [completion_id]
    return [f"{completion_id}:{index}" for index in range(num_choices)]


def read_call(is_chat: bool, body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    """Raises InvalidRequestError naming the field, or the header, that is wrong."""
    return _read_chat(body, headers) if is_chat else _read_completion(body, headers)


def _read_chat(body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    options, fields = read_options(ChatOptions, body, headers)
    _check_streaming(options, fields)
    if options.max_completion_tokens is not None:
        fields["max_tokens"] = options.max_completion_tokens
    if options.logprobs:
        fields["logprobs"] = options.top_logprobs or 0
    elif options.top_logprobs:
        raise InvalidRequestError("top_logprobs: needs logprobs: true", field="top_logprobs")
    if options.reasoning_effort is not None:
        fields["chat_template_kwargs"] = with_effort(
            options.reasoning_effort, fields.get("chat_template_kwargs", {})
        )
    refuse("prompt", fields)
    refuse("embed", fields)
    refuse("tokenize", fields)
    check_size_of_call(len(body), fields, num_prompts=1, n=options.n)
    fields["messages"] = options.messages
    return _call(options, fields, len(body), is_chat=True, prompts=[None])


def with_effort(effort: str, given: Any) -> Any:
    """The variables of the chat template. One that the call sets itself has precedence."""
    if not isinstance(given, dict):
        return given  # refused later, by its name
    ours: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        ours["enable_thinking"] = False
    return {**ours, **given}


def _read_completion(body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    options, fields = read_options(CompletionOptions, body, headers)
    _check_streaming(options, fields)
    fields.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, _min_tokens(fields)))
    refuse("messages", fields)
    refuse("embed", fields)
    refuse("tokenize", fields)
    prompts = prompts_of("prompt", options.prompt)
    check_size_of_call(len(body), fields, len(prompts), options.n)
    shows_prompt_logprobs = "prompt_logprobs" in fields
    echo_only = options.echo and type(fields["max_tokens"]) is int and fields["max_tokens"] == 0
    if echo_only:
        fields["max_tokens"] = 1
    if options.echo:
        # The texts of token ids come with their log-probabilities.
        of_ids = None if all(isinstance(prompt, str) for prompt in prompts) else 0
        wanted = fields.get("logprobs", of_ids)
        if wanted is not None:
            fields.setdefault("prompt_logprobs", wanted)
    call = _call(options, fields, len(body), is_chat=False, prompts=prompts)
    return replace(
        call,
        echo=options.echo,
        echo_only=echo_only,
        shows_prompt_logprobs=shows_prompt_logprobs,
    )


def read_options(
    kind: type[T], body: bytes, headers: Mapping[str, str]
) -> tuple[T, dict[str, Any]]:
    """The options of an endpoint in a body, and all other fields. Raises InvalidRequestError."""
    try:
        given = read_json(body)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    if not isinstance(given, dict):
        raise InvalidRequestError("the body is not a JSON object")
    # Some clients send null for fields that they leave out.
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in _from_headers(headers).items():
        given.setdefault(name, value)
    if issubclass(kind, CallOptions):
        given = in_our_words(given)
    try:
        options = kind.model_validate(given)
    except ValidationError as error:
        raise invalid_request(error) from None
    if isinstance(options, FieldsWithoutEffect):
        for name in options.model_fields_set & _WITHOUT_EFFECT:
            warn_of(name)
    fields = dict(options.model_extra or {})
    if options.model:  # OpenAI's clients cannot leave it out, so it may be empty
        fields["model"] = options.model
    if fields.get("idempotency_key") == "":  # all callers that send it would share one answer
        raise InvalidRequestError("idempotency_key: is empty", field="idempotency_key")
    refuse("request_id", fields)
    return options, fields


def _check_streaming(options: CallOptions, fields: Mapping[str, Any]) -> None:
    if options.stream and "prompt_logprobs" in fields:
        raise InvalidRequestError(
            "prompt_logprobs: cannot be streamed; leave out stream, or ask a completion for echo"
            " and logprobs",
            field="prompt_logprobs",
        )
    if options.stream_options and not options.stream:
        raise InvalidRequestError("stream_options: needs stream: true", field="stream_options")


def _call(
    options: CallOptions,
    fields: dict[str, Any],
    body_bytes: int,
    *,
    is_chat: bool,
    prompts: list[Prompt | None],
) -> CompletionCall:
    stream_options = options.stream_options or {}
    if len(prompts) * options.n > MAX_CHOICES:
        raise InvalidRequestError(
            f"n: {len(prompts)} prompts with {options.n} answers each are more than the"
            f" {MAX_CHOICES} answers that one call may ask for",
            field="n",
        )
    return CompletionCall(
        is_chat=is_chat,
        fields=fields,
        prompts=prompts,
        n=options.n,
        stream=options.stream,
        include_usage=stream_options.get("include_usage", False),
        detach=options.detach,
        wait_for_worker=options.wait_for_worker,
        shows_prompt_logprobs="prompt_logprobs" in fields,
        body_bytes=body_bytes,
    )


def check_size_of_call(
    num_bytes: int, fields: dict[str, Any], num_prompts: int, n: int = 1, named: str = "n"
) -> None:
    """Raises InvalidRequestError for a body that would become many large payloads."""
    total = n * num_bytes
    if num_prompts > 1:  # each prompt has its own copy of the fields
        total += n * (num_prompts - 1) * len(to_json(fields))
    if total > MAX_CALL_BYTES:
        raise InvalidRequestError(
            f"{named}: {num_prompts * n} answers to this take {total} bytes, more than the"
            f" {MAX_CALL_BYTES} that one call may put into the queue",
            field=named,
        )


def prompts_of(field: str, prompt: str | list[Any]) -> list[Prompt | None]:
    """The prompts of a field: one, or several. Raises InvalidRequestError."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt or not all(isinstance(each, str | list) for each in prompt):
        raise InvalidRequestError(
            f"{field}: must be text, token ids, or a list of either", field=field
        )
    return list(prompt)


def _min_tokens(fields: Mapping[str, Any]) -> int:
    given = fields.get("min_tokens", 0)
    return given if isinstance(given, int) else 0


def refuse(name: str, fields: Mapping[str, Any], instead: str = "") -> None:
    """Raises InvalidRequestError for a field of a payload that an endpoint does not have."""
    if name in fields:
        advice = f"; use {instead}" if instead else ""
        raise InvalidRequestError(f"{name}: is not a field of this endpoint{advice}", field=name)


def _from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, header in HEADERS.items():
        text = headers.get(header)
        if text is None:
            continue
        value: Any = text
        if name in _NUMBERS:
            value = int(text) if _NUMBER.fullmatch(text.strip()) else None
        elif name in _SWITCHES:
            value = _WORDS.get(text.strip().lower())
        if value is None:
            kind = "a number" if name in _NUMBERS else "true or false"
            raise InvalidRequestError(f"{header}: {text[:80]!r} is not {kind}", field=header)
        found[name] = value
    return found
