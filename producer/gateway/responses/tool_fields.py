"""Tools and formats of the answer, from their form in /v1/responses to that of a payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from promptq.producer.gateway.openai.tolerated_fields import tools_named
from promptq.shared.errors import InvalidRequestError

_FUNCTION = ("name", "description", "parameters", "strict")
_WORDS = ("auto", "none", "required")
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA = ("name", "description", "schema", "strict")

Tool = dict[str, Any]


def payload_tools(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any
) -> tuple[list[Tool], Any]:
    """The `tools` and the `tool_choice` of a payload; the latter is None if it says nothing.

    Raises InvalidRequestError for tools that this API has beside functions, such as `web_search`.
    """
    nested = [_function(tool) for tool in tools or ()]
    if not isinstance(tool_choice, Mapping):
        if tool_choice is not None and tool_choice not in _WORDS:
            raise _wrong_choice(tool_choice)
        return nested, tool_choice if nested or tool_choice == "required" else None
    match tool_choice.get("type"):
        case "function":
            return nested, {"type": "function", "function": {"name": tool_choice.get("name")}}
        case "allowed_tools":
            return _allowed(nested, tool_choice), tool_choice["mode"]
    raise _wrong_choice(tool_choice.get("type"))


def payload_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `response_format` of a payload for `text`. Raises InvalidRequestError."""
    for name in text or ():
        if name not in ("format", "verbosity"):
            raise InvalidRequestError(
                f"text: {name[:80]!r} is not one of format, verbosity", field="text"
            )
    described = (text or {}).get("format")
    if described is None:
        return None
    kind = described.get("type") if isinstance(described, Mapping) else described
    if kind not in _FORMATS:
        raise InvalidRequestError(
            f"text.format: {str(kind)[:80]!r} is not one of {', '.join(_FORMATS)}",
            field="text.format",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    for name in described:
        if name not in ("type", *_SCHEMA):
            raise InvalidRequestError(
                f"text.format: {name[:80]!r} is not one of type, {', '.join(_SCHEMA)}",
                field="text.format",
            )
    return {"type": kind, kind: {it: described[it] for it in _SCHEMA if it in described}}


def _function(tool: Mapping[str, Any]) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequestError(
            f"tools: a tool of type {str(kind)[:80]!r} is not served, only functions are",
            field="tools",
        )
    if not isinstance(tool.get("name"), str):
        raise InvalidRequestError(
            'tools: a function must be like {"type": "function", "name": ..., "parameters": {...}}',
            field="tools",
        )
    function = {it: tool[it] for it in _FUNCTION if tool.get(it) is not None}
    return {"type": "function", "function": function}


def _allowed(tools: list[Tool], choice: Mapping[str, Any]) -> list[Tool]:
    listed = choice.get("tools")
    mode = choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequestError(
            "tool_choice: allowed_tools needs a mode, auto or required, and tools",
            field="tool_choice",
        )
    names = [it.get("name") if isinstance(it, Mapping) else it for it in listed]
    return tools_named(names, tools)


def _wrong_choice(given: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"tool_choice: {str(given)[:80]!r} is not one of {', '.join(_WORDS)}, function,"
        " allowed_tools",
        field="tool_choice",
    )
