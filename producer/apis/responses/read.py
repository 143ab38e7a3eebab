"""Converts the body of a call of /v1/responses to a `CompletionCall` that is a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json, to_json

from promptq.producer.apis.responses.input_items import messages_of, read_items
from promptq.producer.apis.responses.response_call import NewResponse, ResponseCall
from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_body import (
    IGNORED,
    Body,
    BodyOptions,
    CachedOptions,
    GeneratingOptions,
    HistoryNeededError,
    StreamOptions,
    check_effort,
    check_one_of,
    read_options,
    refuse,
    tools_named,
    with_effort,
    without_none,
    wrong_field,
)
from promptq.producer.calls.output.model_text import needed_of
from promptq.shared.protocol.request import Objects
from promptq.shared.queue.spoilt import UNREADABLE

NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    ".json_schema.schema": ".schema",
    ".function.parameters": ".parameters",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
"""Maps names of fields in a payload to their names in the body; see `in_api_names`."""
LOGPROBS = "message.output_text.logprobs"
_OTHER_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
"""Values of `include` that are accepted without effect, because promptq has no such items."""

_UNSET_OF_TOOL = {"description": None, "parameters": None, "strict": None}  # if unset in the call
_REASONING = ("effort", "summary", "generate_summary", "context", "mode")

_FUNCTION = ("name", "description", "parameters", "strict")
_CHOICES = ("auto", "none", "required")
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA = ("name", "description", "schema", "strict")

Tool = dict[str, Any]


class InputOptions(BodyOptions):
    """The fields of /v1/responses/input_tokens."""

    input: str | list[Any] = Field(description="a text, or a list of items")
    instructions: str | None = Field(
        None, description="a system message before the conversation, for this response alone"
    )
    previous_response_id: str | None = Field(
        None, description="the stored response that this one continues"
    )
    tools: Objects | None = Field(None, description="functions, in the flat form of this API")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = Field(True, description=IGNORED)
    text: dict[str, Any] | None = Field(
        None, description='{"format": ...}: text, json_object or json_schema'
    )
    reasoning: dict[str, Any] | None = Field(
        None, description="`effort` becomes the template's variable `reasoning_effort`"
    )
    truncation: Literal["disabled"] | None = Field(None, description="`disabled`")


class ResponseOptions(InputOptions, GeneratingOptions, CachedOptions):
    """The fields of /v1/responses."""

    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] | None = Field(None, description=f"`{LOGPROBS}`")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report this number of the likeliest tokens at each position; needs `include`",
    )
    store: bool = Field(True, description="keep it, so that it can be read and continued later")
    background: bool = Field(False, description="answer at once, and continue without the client")
    stream_options: StreamOptions | None = Field(None, description=IGNORED)
    max_tool_calls: int | None = Field(None, description=IGNORED)
    user: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)


def read_response(
    body: Body, headers: Mapping[str, str], response_id: str, history: bytes | None
) -> CompletionCall:
    """Parses a call of /v1/responses as a chat. The chat's `extra` is a NewResponse.

    `history` has the items of earlier responses, one on each line. If the call continues a response
    and `history` is None, raises HistoryNeededError. Raises InvalidRequestError.
    """
    options, fields = read_options(ResponseOptions, body, headers)
    _check_options(options)
    own = _set_chat(options, fields, response_id, history)
    with_logprobs = LOGPROBS in (options.include or ())
    fields |= without_none(
        {
            "response_format": payload_format(options.text),
            "max_tokens": options.max_output_tokens,
            "logprobs": (options.top_logprobs or 0) if with_logprobs else None,
        }
    )
    detach = options.detach or options.background
    call = ResponseCall(
        id=response_id,
        model=options.model or "",
        echo=_echo(options, fields),
        background=options.background,
        store=options.store,
        detach=detach,
        reading=needed_of(fields),
        with_logprobs=with_logprobs,
        previous_response_id=options.previous_response_id,
    )
    lines = b"\n".join(to_json(item) for item in own) if options.store else b""
    num_bytes, extra = body.num_bytes + len(history or b""), NewResponse(call, lines)
    return options.call(fields, num_bytes, detach=detach, form="response", names=NAMES, extra=extra)


def read_input_count(
    body: Body, headers: Mapping[str, str], response_id: str, history: bytes | None
) -> CompletionCall:
    """Parses a call that counts a conversation's tokens. Raises the errors of `read_response`."""
    options, fields = read_options(InputOptions, body, headers)
    payload_format(options.text)
    _set_chat(options, fields, response_id, history)
    num_bytes = body.num_bytes + len(history or b"")
    return options.call({**fields, "tokenize": True}, num_bytes, form="input_count", names=NAMES)


def _set_chat(
    options: InputOptions, fields: dict[str, Any], response_id: str, history: bytes | None
) -> list[dict[str, Any]]:
    """Adds messages, tools and template variables to `fields`. Returns the new input's items."""
    refuse(fields, NAMES, NAMES)
    refuse(fields, ["embed", "prompt_logprobs", "tokenize"])
    own = read_items(options.input, response_id.removeprefix("resp_"))
    if options.previous_response_id and history is None:
        raise HistoryNeededError(options.previous_response_id)
    try:
        earlier = [from_json(line) for line in (history or b"").splitlines()]
        fields["messages"] = messages_of([*earlier, *own])
        fields.setdefault("session", [*earlier, *own][0]["id"])  # all later responses have it, too
    except UNREADABLE:  # the call's items were checked before
        raise wrong_field("previous_response_id", "the stored conversation is spoilt") from None
    if options.instructions:
        fields["messages"].insert(0, {"role": "system", "content": options.instructions})
    tools, tool_choice = payload_tools(options.tools, options.tool_choice)
    variables = _template_variables(options, fields)
    chat_fields = {"tools": tools or None, "tool_choice": tool_choice}
    fields |= without_none({**chat_fields, "chat_template_kwargs": variables})
    return own


def _check_options(options: ResponseOptions) -> None:
    for name in options.include or ():
        if name != LOGPROBS and name not in _OTHER_INCLUDES:
            raise wrong_field("include", f"{name[:80]!r} is not served; {LOGPROBS!r} is")
    if options.top_logprobs and LOGPROBS not in (options.include or ()):
        raise wrong_field("top_logprobs", f"needs include: [{LOGPROBS!r}]")
    if options.background and not options.store:
        raise wrong_field("background", "needs store: true")


def _template_variables(options: InputOptions, fields: Mapping[str, Any]) -> Any:
    for name in options.reasoning or ():
        check_one_of("reasoning", name, _REASONING)
    effort = (options.reasoning or {}).get("effort")
    check_effort("reasoning.effort", effort)
    kwargs = fields.get("chat_template_kwargs")
    return None if effort is None else with_effort(effort, {} if kwargs is None else kwargs)


def _echo(options: ResponseOptions, fields: Mapping[str, Any]) -> str:
    """Returns members of the response that repeat the call's fields, as JSON without braces."""
    described = (options.text or {}).get("format") or {"type": "text"}
    if described["type"] == "json_schema":
        described = {"description": None, "strict": True, **described}
    members = {
        "frequency_penalty": fields.get("frequency_penalty", 0.0),
        "instructions": options.instructions,
        "max_output_tokens": options.max_output_tokens,
        "max_tool_calls": options.max_tool_calls,
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": options.parallel_tool_calls,
        "presence_penalty": fields.get("presence_penalty", 0.0),
        "previous_response_id": options.previous_response_id,
        "prompt_cache_key": options.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(options.reasoning or {})},
        "safety_identifier": options.safety_identifier,
        "store": options.store,
        "temperature": fields.get("temperature", 1.0),
        "text": {**(options.text or {}), "format": described},
        "tool_choice": options.tool_choice or "auto",
        "tools": [{**_UNSET_OF_TOOL, **tool} for tool in options.tools or ()],
        "top_logprobs": options.top_logprobs or 0,
        "top_p": fields.get("top_p", 1.0),
        "truncation": "disabled",
        "user": options.user,
    }
    return to_json(members).decode()[1:-1]


def payload_tools(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any
) -> tuple[list[Tool], Any]:
    """Returns the `tools` and the `tool_choice` of a payload (None if the choice has no effect).
    Raises InvalidRequestError for a tool that is not a function, such as `web_search`."""
    nested = [_function(tool) for tool in tools or ()]
    if tool_choice is None or tool_choice in _CHOICES:
        return nested, tool_choice if nested or tool_choice == "required" else None
    kind = tool_choice
    if isinstance(tool_choice, Mapping):
        kind = tool_choice.get("type")
        if kind == "function":
            return nested, {"type": "function", "function": {"name": tool_choice.get("name")}}
        if kind == "allowed_tools":
            return _allowed(nested, tool_choice), tool_choice["mode"]
    known = ", ".join((*_CHOICES, "function", "allowed_tools"))
    raise wrong_field("tool_choice", f"{str(kind)[:80]!r} is not one of {known}")


def payload_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the `response_format` that means the same as the field `text`; None for plain text.
    Raises InvalidRequestError."""
    for name in text or ():
        check_one_of("text", name, ("format", "verbosity"))
    described = (text or {}).get("format")
    if described is None:
        return None
    kind: Any = described.get("type") if isinstance(described, Mapping) else described
    check_one_of("text.format", kind, _FORMATS)
    if not isinstance(described, Mapping):
        raise wrong_field("text.format", f'must be an object, such as {{"type": "{kind}"}}')
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    for name in described:
        check_one_of("text.format", name, ("type", *_SCHEMA))
    return {"type": kind, kind: {name: described[name] for name in _SCHEMA if name in described}}


def _function(tool: Mapping[str, Any]) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise wrong_field(
            "tools", f"a tool of type {str(kind)[:80]!r} is not served, only functions are"
        )
    if not isinstance(tool.get("name"), str):
        raise wrong_field(
            "tools",
            'a function must be like {"type": "function", "name": ..., "parameters": {...}}',
        )
    function = {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _allowed(tools: list[Tool], choice: Mapping[str, Any]) -> list[Tool]:
    listed = choice.get("tools")
    mode = choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise wrong_field("tool_choice", "allowed_tools needs a mode, auto or required, and tools")
    names = [tool.get("name") if isinstance(tool, Mapping) else tool for tool in listed]
    return tools_named(names, tools)
