"""Tools and the choice among them, from their form in /v1/messages to that of a payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from promptq.shared.errors import InvalidRequestError

_CHOICES: dict[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_OF_CHOICE = ("type", "name", "disable_parallel_tool_use")


def payload_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], Any]:
    """The `tools` and the `tool_choice` of a payload; the latter is None if it says nothing.

    Raises InvalidRequestError for tools that Anthropic runs, such as a web search.
    """
    functions = [_function(tool) for tool in tools or ()]
    if choice is None:
        return functions, None
    for name in choice:
        if name not in _OF_CHOICE:
            raise _wrong(f"tool_choice: {name[:80]!r} is not one of {', '.join(_OF_CHOICE)}")
    kind = choice.get("type")
    if kind == "tool":
        return functions, {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise _wrong(
            f"tool_choice: type {str(kind)[:80]!r} is not one of {', '.join(_CHOICES)}, tool"
        )
    return functions, _CHOICES[kind] if functions or kind == "any" else None


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise _wrong(
            f"tools: a tool of type {str(kind)[:80]!r} is not served, only those with an"
            " input_schema are"
        )
    if not (isinstance(tool.get("name"), str) and isinstance(tool.get("input_schema"), dict)):
        raise _wrong('tools: a tool must be like {"name": ..., "input_schema": {...}}')
    function = {
        it: tool[it] for it in ("name", "description", "strict") if tool.get(it) is not None
    }
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=message.partition(":")[0])
