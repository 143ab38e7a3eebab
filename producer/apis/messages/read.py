"""Converts the body of a call of /v1/messages to a `CompletionCall` that is a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_body import (
    Body,
    BodyOptions,
    GeneratingOptions,
    check_effort,
    check_one_of,
    read_options,
    refuse,
    with_effort,
    without_none,
    wrong_field,
)
from promptq.producer.calls.errors import ApiError
from promptq.shared.protocol.output_format import IF_NOT_STRICT
from promptq.shared.protocol.pictures import content_of, picture_part
from promptq.shared.protocol.request import Objects, Texts

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    ".json_schema.schema": ".schema",
    ".function.parameters": ".input_schema",
    "output_prefix": "messages",
}
"""Maps names of fields in a payload to their names in the body; see `in_api_names`.

`output_prefix` comes from the last of the `messages`, if that message is the assistant's.
"""
_WITHOUT_ANSWER = ("prompt", "embed", "tokenize", "logprobs", "prompt_logprobs")
"""Fields of a payload that are refused, because a message cannot show their effect."""
_UNSUPPORTED = ("thread", "context_management")
"""Fields that are refused. After the refusal, Anthropic's tool runners no longer send `thread`."""
_THINKING = ("type", "budget_tokens", "display")
_THINKING_TYPES = ("enabled", "disabled", "adaptive")

Message = dict[str, Any]

_SERVED = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_TEXT_OR_PICTURE = ("text", "image")
_BETWEEN_TURNS = "\n\n"

_CHOICES: dict[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_OF_CHOICE = ("type", "name", "disable_parallel_tool_use")


class CountOptions(BodyOptions):
    """The fields of /v1/messages/count_tokens."""

    messages: Objects = Field(
        min_length=1,
        description="texts, images and tool calls; if the last one is the assistant's, the"
        " answer continues it",
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


def read_message_call(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/messages. Raises InvalidRequestError that names the wrong field."""
    options, fields = read_options(MessageOptions, body, headers)
    prefill = _set_chat(options, fields)
    response_format = _format_of(options.output_config or {})
    names = NAMES if response_format is None else {**NAMES, IF_NOT_STRICT: ""}
    fields |= without_none(
        {
            "max_tokens": options.max_tokens,
            "stop": options.stop_sequences or None,
            "temperature": options.temperature,
            "response_format": response_format,
            "output_prefix": {"text": prefill} if prefill else None,
        }
    )
    return options.call(fields, body.num_bytes, form="message", names=names)


def read_count_call(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call that counts a conversation's tokens. Raises InvalidRequestError."""
    options, fields = read_options(CountOptions, body, headers)
    _format_of(options.output_config or {})
    if prefill := _set_chat(options, fields):
        fields["messages"].append({"role": "assistant", "content": prefill})
    return options.call({**fields, "tokenize": True}, body.num_bytes, form="count", names=NAMES)


def _set_chat(options: CountOptions, fields: dict[str, Any]) -> str:
    """Adds messages, tools and template variables to a payload's fields. Returns the text with
    which the answer begins. Raises ApiError and InvalidRequestError."""
    refuse(fields, NAMES, NAMES)
    if unsupported := [name for name in _UNSUPPORTED if name in fields]:
        raise ApiError(
            400,
            f"{', '.join(unsupported)}: not served; send the whole conversation instead",
            param=unsupported[0],
            code="thread_unsupported_request",
            unsupported=unsupported,
        )
    refuse(fields, _WITHOUT_ANSWER)
    fields["messages"], prefill = chat_of(options.messages, options.system)
    tools, tool_choice = payload_tools(options.tools, options.tool_choice)
    variables = _template_variables(options, fields)
    chat_fields = {"tools": tools or None, "tool_choice": tool_choice}
    fields |= without_none({**chat_fields, "chat_template_kwargs": variables})
    return prefill


def _format_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    for name in config:
        check_one_of("output_config", name, ("effort", "format"))
    wanted = config.get("format")
    if wanted is None:
        return None
    is_schema = isinstance(wanted, dict) and wanted.keys() == {"type", "schema"}
    if not is_schema or wanted["type"] != "json_schema" or not isinstance(wanted["schema"], dict):
        raise wrong_field(
            "output_config.format", 'must be like {"type": "json_schema", "schema": {...}}'
        )
    described = {"name": "output", "schema": wanted["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": described}


def _template_variables(options: CountOptions, fields: Mapping[str, Any]) -> Any:
    thinking = options.thinking or {}
    for name in thinking:
        check_one_of("thinking", name, _THINKING)
    kind = thinking.get("type")
    if options.thinking is not None:
        check_one_of("thinking", kind, _THINKING_TYPES, "type")
    if thinking.get("display") not in (None, "summarized"):
        raise wrong_field(
            "thinking.display", "must be 'summarized' if it is set: thinking is always shown"
        )
    effort = (options.output_config or {}).get("effort")
    check_effort("output_config.effort", effort)
    if kind == "disabled":
        effort = "none"
    kwargs = fields.get("chat_template_kwargs")
    if (kind is None and effort is None) or not isinstance(kwargs, dict | None):
        return kwargs
    variables = {} if kind in (None, "disabled") else {"enable_thinking": True}
    if effort is not None:
        variables = with_effort(effort, variables)
    return variables | (kwargs or {})


def chat_of(
    messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> tuple[list[Message], str]:
    """Returns the messages of a chat, and the text with which the answer begins. If the last
    message is the assistant's, the answer begins with the text of this message, which is left out
    of the messages. Otherwise, the text is ''.

    Joins successive messages of one role. Raises InvalidRequestError, for example for a document.
    """
    chat: list[Message] = []
    if system:
        chat.append({"role": "system", "content": _text_of("system", system)})
    for index, message in enumerate(messages):
        where = f"messages: message {index}"
        role: Any = message.get("role")
        check_one_of(where, role, [*_SERVED], "role")
        blocks = _blocks_of(where, message.get("content"), _SERVED[role])
        if role == "user":
            _add_user(chat, where, blocks)
        else:
            _add(chat, _assistant(where, blocks) if role == "assistant" else _plain(role, blocks))
    if not chat or chat[-1]["role"] != "assistant":
        return chat, ""
    last = chat.pop()
    if last.keys() > {"role", "content"}:
        raise wrong_field(
            "messages",
            f"message {len(messages) - 1}: may contain only text, because the answer continues it:"
            " it is the assistant's, and the last one",
        )
    return chat, last["content"]


def _add_user(chat: list[Message], where: str, blocks: Sequence[Mapping[str, Any]]) -> None:
    # Each result of a tool becomes a separate message.
    own: list[Mapping[str, Any]] = []
    for block in blocks:
        if block["type"] in _TEXT_OR_PICTURE:
            own.append(block)
            continue
        if own:
            _add(chat, {"role": "user", "content": _content_of(where, own)})
            own = []
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise wrong_field(where, "a tool_result needs tool_use_id, a text")
        place = f"{where}: tool_result"
        inner = _blocks_of(place, block.get("content") or "", _TEXT_OR_PICTURE)
        content = _content_of(place, inner)
        chat.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if own or not blocks:
        _add(chat, {"role": "user", "content": _content_of(where, own)})


def _content_of(where: str, blocks: Sequence[Mapping[str, Any]]) -> str | list[Message]:
    return content_of(_part(where, block) for block in blocks)


def _part(where: str, block: Mapping[str, Any]) -> Message:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return picture_part(f"data:{kind};base64,{data}")
        case {"type": "url", "url": str(url)} | {"type": "file", "file_id": str(url)}:
            return picture_part(url)
    raise wrong_field(where, "the source of an image must be of type base64, url or file")


def _assistant(where: str, blocks: Sequence[Mapping[str, Any]]) -> Message:
    message = _plain("assistant", [block for block in blocks if block["type"] == "text"])
    thinking = [block.get("thinking") for block in blocks if block["type"] == "thinking"]
    if not all(isinstance(text, str) for text in thinking):
        raise wrong_field(where, "a block of type 'thinking' needs thinking, a text")
    if reasoning := "".join(map(str, thinking)):
        message["reasoning_content"] = reasoning
    calls = [_call(where, block) for block in blocks if block["type"] == "tool_use"]
    return message | ({"tool_calls": calls} if calls else {})


def _plain(role: str, blocks: Sequence[Mapping[str, Any]]) -> Message:
    return {"role": role, "content": "".join(block["text"] for block in blocks)}


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = (block.get(member) for member in ("id", "name", "input"))
    arguments = {} if arguments is None else arguments
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, dict)):
        raise wrong_field(where, "a tool_use needs id and name, texts, and input, an object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add(chat: list[Message], message: Message) -> None:
    # Joins successive messages of one role, except system messages.
    if not chat or chat[-1]["role"] != message["role"] or message["role"] == "system":
        chat.append(message)
        return
    last = chat[-1]
    contents = [content for content in (last["content"], message["content"]) if content]
    if all(isinstance(content, str) for content in contents):
        last["content"] = _BETWEEN_TURNS.join(contents)
    else:
        between: Message = {"type": "text", "text": _BETWEEN_TURNS}
        parts = [_parts_of(content) for content in contents]
        last["content"] = [*parts[0], *(part for more in parts[1:] for part in (between, *more))]
    for name in ("reasoning_content", "tool_calls"):
        if name in message:
            last[name] = last[name] + message[name] if name in last else message[name]


def _parts_of(content: str | list[Message]) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_of(where: str, content: Any) -> str:
    return "".join(block["text"] for block in _blocks_of(where, content, ("text",)))


def _blocks_of(where: str, content: Any, served: Sequence[str]) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong_field(where, "content must be text or a list of blocks")
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else block
        if not isinstance(block, Mapping) or kind not in served:
            raise wrong_field(
                where,
                f"a block of type {str(kind)[:80]!r} is not served; served are {', '.join(served)}",
            )
        if kind == "text" and not isinstance(block.get("text"), str):
            raise wrong_field(where, "a block of type 'text' needs text")
    return content


def payload_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], Any]:
    """Returns the `tools` and the `tool_choice` of a payload (None if the choice has no effect).
    Raises InvalidRequestError for a tool that Anthropic would run, such as a web search."""
    functions = [_function(tool) for tool in tools or ()]
    if choice is None:
        return functions, None
    for name in choice:
        check_one_of("tool_choice", name, _OF_CHOICE)
    kind: Any = choice.get("type")
    check_one_of("tool_choice", kind, (*_CHOICES, "tool"), "type")
    if kind == "tool":
        return functions, {"type": "function", "function": {"name": choice.get("name")}}
    return functions, _CHOICES[kind] if functions or kind == "any" else None


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise wrong_field(
            "tools",
            f"a tool of type {str(kind)[:80]!r} is not served; those with input_schema are",
        )
    if not (isinstance(tool.get("name"), str) and isinstance(tool.get("input_schema"), dict)):
        raise wrong_field("tools", 'a tool must be like {"name": ..., "input_schema": {...}}')
    function = {
        name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
