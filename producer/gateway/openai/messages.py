"""A chat's messages, from what OpenAI's clients send to what chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from promptq.shared.errors import InvalidRequestError


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make content one text, arguments of tool calls objects, and `developer` `system`.

    Raises InvalidRequestError for content that is not text, such as an image.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(index, "has no role")
    clean = {**message, "content": _text(index, message.get("content"))}
    if role == "developer":
        clean["role"] = "system"
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise _wrong(index, "tool_calls must be a list")
        clean["tool_calls"] = [_tool_call(index, call) for call in calls]
    return clean


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(index, "content must be text or a list of parts")
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise _wrong(index, f"a part of type {str(kind)[:80]!r} is not served, only text is")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(index: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _wrong(index, "a tool call has no function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:  # such as those of a call that was cut
        return call
    return {**call, "function": {**function, "arguments": read}}


def _wrong(index: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages: message {index}: {what}", field="messages")
