"""Converts the body of a call of /v1/chat/completions or /v1/completions to a `CompletionCall`.

`prepare` (calls/call_to_payloads.py) makes payloads from this call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from promptq.producer.apis.completions.tolerated_fields import (
    FieldsWithoutEffect,
    FixedFields,
    in_our_names,
    names_in,
)
from promptq.producer.calls.call import MAX_CHOICES, CompletionCall
from promptq.producer.calls.call_body import (
    IGNORED,
    ONLY_VALUE,
    Body,
    CachedOptions,
    GeneratingOptions,
    StreamOptions,
    check_size_of_call,
    prompts_of,
    read_options,
    refuse,
    with_effort,
    wrong_field,
)
from promptq.producer.clients.request_builder import Prompt
from promptq.shared.protocol.request import Objects

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` at /v1/completions, as in the OpenAI API."""


class CallOptions(GeneratingOptions, CachedOptions, FieldsWithoutEffect, FixedFields):
    """The fields that completions and chats have in common."""

    n: int = Field(1, ge=1, le=MAX_CHOICES, description="how many answers each prompt gets")
    stream_options: StreamOptions | None = Field(
        None, description='{"include_usage": true}: a last chunk has the usage'
    )

    @classmethod
    def renamed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return in_our_names(fields)

    @classmethod
    def names_in(cls, fields: Mapping[str, Any]) -> dict[str, str]:
        return names_in(fields)


class CompletionOptions(CallOptions):
    """The fields of /v1/completions."""

    prompt: str | list[Any] = Field(description="text or token ids, or a list of either")
    echo: bool = Field(
        False,
        description="begin the answer with the prompt, and with its logprobs if there are any",
    )
    suffix: Literal[""] | None = Field(None, description=ONLY_VALUE)


class ChatOptions(CallOptions):
    """The fields of /v1/chat/completions."""

    messages: Objects = Field(min_length=1)
    logprobs: bool = Field(False, description="report each token's log-probability")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="and at each position, this number of the likeliest tokens"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="another name of max_tokens")
    reasoning_effort: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="the variable of that name in the model's chat template; `none` also sets"
        " `enable_thinking` to false",
    )
    parallel_tool_calls: bool | None = Field(None, description=IGNORED)
    modalities: list[Literal["text"]] | None = Field(None, description="only text is served")
    echo: Literal[False] | None = Field(None, description=ONLY_VALUE)


def read_chat(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/chat/completions. Raises InvalidRequestError."""
    options, fields = read_options(ChatOptions, body, headers)
    _check_streaming(options, fields)
    if options.max_completion_tokens is not None:
        fields["max_tokens"] = options.max_completion_tokens
    if options.logprobs:
        fields["logprobs"] = options.top_logprobs or 0
    elif options.top_logprobs:
        raise wrong_field("top_logprobs", "needs logprobs: true")
    if options.reasoning_effort is not None:
        fields["chat_template_kwargs"] = with_effort(
            options.reasoning_effort, fields.get("chat_template_kwargs", {})
        )
    refuse(fields, ["prompt", "embed", "tokenize"])
    check_size_of_call(body.num_bytes, fields, num_prompts=1, n=options.n)
    fields["messages"] = options.messages
    shows_prompt_logprobs = "prompt_logprobs" in fields
    return _call(options, fields, body, [None], shows_prompt_logprobs=shows_prompt_logprobs)


def read_completion(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/completions. Raises InvalidRequestError."""
    options, fields = read_options(CompletionOptions, body, headers)
    _check_streaming(options, fields)
    min_tokens = fields.get("min_tokens", 0)
    least = min_tokens if isinstance(min_tokens, int) else 0
    fields.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, least))
    refuse(fields, ["messages", "embed", "tokenize"])
    prompts = prompts_of("prompt", options.prompt)
    check_size_of_call(body.num_bytes, fields, len(prompts), options.n)
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
    return _call(
        options,
        fields,
        body,
        prompts,
        is_chat=False,
        echo=options.echo,
        echo_only=echo_only,
        shows_prompt_logprobs=shows_prompt_logprobs,
    )


def _check_streaming(options: CallOptions, fields: Mapping[str, Any]) -> None:
    if options.stream and "prompt_logprobs" in fields:
        raise wrong_field(
            "prompt_logprobs",
            "cannot be streamed; leave out stream, or ask a completion for echo and logprobs",
        )
    if options.stream_options and not options.stream:
        raise wrong_field("stream_options", "needs stream: true")


def _call(
    options: CallOptions,
    fields: dict[str, Any],
    body: Body,
    prompts: list[Prompt | None],
    **answer: bool,
) -> CompletionCall:
    if len(prompts) * options.n > MAX_CHOICES:
        raise wrong_field(
            "n",
            f"{len(prompts)} prompts with {options.n} answers each are more than the {MAX_CHOICES}"
            " answers that one call may have",
        )
    include_usage = (options.stream_options or {}).get("include_usage", False)
    return options.call(
        fields, body.num_bytes, prompts=prompts, n=options.n, include_usage=include_usage, **answer
    )
