"""A call of /v1/messages: its body and headers, as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from promptq.producer.gateway.anthropic.field_names import NAMES
from promptq.producer.gateway.anthropic.input_messages import chat_of
from promptq.producer.gateway.anthropic.tool_fields import payload_tools
from promptq.producer.gateway.http.errors import ApiError
from promptq.producer.gateway.openai.request_bodies import (
    BodyOptions,
    CompletionCall,
    GeneratingOptions,
    read_options,
    refuse,
    with_effort,
)
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Objects, Texts

_WITHOUT_ANSWER = ("prompt", "embed", "tokenize", "logprobs", "prompt_logprobs")
"""Fields of a payload that ask for what a message does not have."""
_UNSUPPORTED = ("thread", "context_management")
"""Fields that Anthropic's tool runners send. After this error they go on without `thread`."""
_THINKING = ("type", "budget_tokens", "display")
_THINKING_TYPES = ("enabled", "disabled", "adaptive")
_LONGEST_EFFORT = 100


class CountOptions(BodyOptions):
    """The fields of /v1/messages/count_tokens."""

    messages: Objects = Field(
        min_length=1, description="text and tools; the answer goes on with a last one of assistant"
    )
    system: str | Objects | None = Field(None, description="a text, or blocks of text")
    tools: Objects | None = Field(None, description="each with name, description, input_schema")
    tool_choice: dict[str, Any] | None = Field(None, description="type: auto, any, tool, none")
    thinking: dict[str, Any] | None = Field(
        None,
        description="type: `enabled` and `adaptive` set the template's variable `enable_thinking`"
        " to true, `disabled` to false, and `reasoning_effort` to `none`",
    )
    output_config: dict[str, Any] | None = Field(
        None,
        description="`effort` becomes the template's variable `reasoning_effort`; `format` binds"
        " the answer to a schema",
    )
    cache_control: dict[str, Any] | None = Field(None, description="accepted without effect")


class MessageOptions(CountOptions, GeneratingOptions):
    """The fields of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts | None = None
    temperature: float | None = Field(None, ge=0.0, le=1.0)
    service_tier: str | None = Field(None, description="accepted without effect")


def read_message_call(body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    """The chat that a call becomes. Raises InvalidRequestError naming the field that is wrong."""
    options, fields = read_options(MessageOptions, body, headers)
    prefill = _set_chat(options, fields)
    own_fields = {
        "max_tokens": options.max_tokens,
        "stop": options.stop_sequences or None,
        "temperature": options.temperature,
        "response_format": _format_of(options.output_config or {}),
        "output_prefix": {"text": prefill} if prefill else None,
    }
    fields |= {name: value for name, value in own_fields.items() if value is not None}
    return CompletionCall(
        is_chat=True,
        fields=fields,
        prompts=[None],
        stream=options.stream,
        detach=options.detach,
        wait_for_worker=options.wait_for_worker,
        body_bytes=len(body),
        form="message",
    )


def read_count_call(body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    """As `read_message_call`, for a call that is told how many tokens the conversation has."""
    options, fields = read_options(CountOptions, body, headers)
    _format_of(options.output_config or {})
    if prefill := _set_chat(options, fields):
        fields["messages"].append({"role": "assistant", "content": prefill})
    return CompletionCall(
        is_chat=True,
        fields={**fields, "tokenize": True},
        prompts=[None],
        wait_for_worker=options.wait_for_worker,
        body_bytes=len(body),
        form="count",
    )


def _set_chat(options: CountOptions, fields: dict[str, Any]) -> str:
    """Set the fields of a payload that make up the chat. Returns what the answer begins with.

    Raises InvalidRequestError, ApiError.
    """
    for name, other in NAMES.items():
        refuse(name, fields, other)
    if unsupported := [name for name in _UNSUPPORTED if name in fields]:
        raise ApiError(
            400,
            f"{', '.join(unsupported)}: not served; send the whole conversation instead",
            param=unsupported[0],
            code="thread_unsupported_request",
            unsupported=unsupported,
        )
    for name in _WITHOUT_ANSWER:
        refuse(name, fields)
    fields["messages"], prefill = chat_of(options.messages, options.system)
    tools, tool_choice = payload_tools(options.tools, options.tool_choice)
    own_fields = {
        "tools": tools or None,
        "tool_choice": tool_choice,
        "chat_template_kwargs": _template_variables(options, fields),
    }
    fields |= {name: value for name, value in own_fields.items() if value is not None}
    return prefill


def _format_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `response_format` of a payload."""
    for name in config:
        if name not in ("effort", "format"):
            raise _wrong("output_config", f"{name[:80]!r} is not one of effort, format")
    given = config.get("format")
    if given is None:
        return None
    is_schema = isinstance(given, dict) and given.keys() == {"type", "schema"}
    if not is_schema or given["type"] != "json_schema" or not isinstance(given["schema"], dict):
        raise _wrong(
            "output_config.format", 'must be like {"type": "json_schema", "schema": {...}}'
        )
    described = {"name": "output", "schema": given["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": described}


def _template_variables(options: CountOptions, fields: Mapping[str, Any]) -> Any:
    """The variables of the chat template; None if there are none."""
    thinking = options.thinking or {}
    for name in thinking:
        if name not in _THINKING:
            raise _wrong("thinking", f"{name[:80]!r} is not one of {', '.join(_THINKING)}")
    kind = thinking.get("type")
    if options.thinking is not None and kind not in _THINKING_TYPES:
        raise _wrong(
            "thinking", f"type {str(kind)[:80]!r} is not one of {', '.join(_THINKING_TYPES)}"
        )
    if thinking.get("display") not in (None, "summarized"):
        raise _wrong("thinking.display", "is not served but for 'summarized'; thinking is shown")
    effort = (options.output_config or {}).get("effort")
    if effort is not None and not (isinstance(effort, str) and 0 < len(effort) <= _LONGEST_EFFORT):
        raise _wrong("output_config.effort", f"must be a text of 1 to {_LONGEST_EFFORT} characters")
    if kind == "disabled":
        effort = "none"
    given = fields.get("chat_template_kwargs")
    if (kind is None and effort is None) or not isinstance(given, dict | None):
        return given
    variables = {} if kind in (None, "disabled") else {"enable_thinking": True}
    if effort is not None:
        variables = with_effort(effort, variables)
    return variables | (given or {})


def _wrong(field: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {what}", field=field)
