"""Finds out whether a chat template reads content as a text or as a list of parts, and what the
template writes for a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from promptq.shared.protocol.pictures import is_picture

Message = dict[str, Any]
Tools = list[dict[str, Any]]
_ROLES = ("user", "system", "assistant", "tool")
_PROBE = "promptq-probe"
_PICTURE = {"type": "image"}
_TOOL = {"name": "now", "description": "-", "parameters": {"type": "object", "properties": {}}}
_TOOLS: Tools = [{"type": "function", "function": _TOOL}]


def reads_parts(
    write: Callable[[list[Message], Tools | None], str], *, with_tools: bool
) -> dict[str, bool]:
    """Returns, for each role, whether the template reads content only as a list of parts.

    The templates of many vision models do not read content that is a text. This function renders
    short chats in both forms and searches the result for the content, as llama.cpp does. `write`
    renders a chat, and raises an Exception if the template refuses the chat.
    """
    reads: dict[str, bool] = {}

    def is_written(role: str, in_parts: bool) -> bool:
        chat = [_message(role, _PROBE, in_parts)]
        if role != "user":
            at = 1 if role == "system" else 0
            chat.insert(at, _message("user", "Hi", reads["user"]))
        try:
            return _PROBE in write(chat, _TOOLS if with_tools else None)
        except Exception:
            return False

    for role in _ROLES:
        as_text, as_parts = (is_written(role, in_parts) for in_parts in (False, True))
        is_unknown = not (as_text or as_parts)
        reads[role] = reads.get("user", False) if is_unknown else not as_text
    return reads


def mark_of_picture(write: Callable[[list[Message]], str]) -> str:
    """Returns the text that a template writes for a picture; empty if it writes none. `write` is
    as in `reads_parts`."""
    chat = [{"role": "user", "content": [_text(_PROBE), _PICTURE, _text(_PROBE)]}]
    try:
        return "".join(write(chat).split(_PROBE)[1:2])
    except Exception:
        return ""


def in_form(messages: Sequence[Message], reads_parts: dict[str, bool]) -> list[Message]:
    """Returns the messages with content that the template reads. If `reads_parts` is True for a
    role, text becomes a list of parts. In a list, pictures become parts of the type `image`."""
    return [
        message | {"content": [_PICTURE if is_picture(part) else part for part in content]}
        if isinstance(content := message["content"], list)
        else message | _message(message["role"], content, in_parts=True)
        if reads_parts.get(message["role"], reads_parts["user"])
        else message
        for message in messages
    ]


def _message(role: str, text: str, in_parts: bool) -> Message:
    return {"role": role, "content": [_text(text)] if in_parts else text}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
