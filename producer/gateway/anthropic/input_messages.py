"""The messages of a conversation, from Anthropic's form to what chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from promptq.shared.errors import InvalidRequestError

Message = dict[str, Any]

_SERVED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""The types of blocks that are served, by roles."""
_BETWEEN_TURNS = "\n\n"


def chat_of(
    messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> tuple[list[Message], str]:
    """The messages of a chat, and the text with which its answer begins.

    That is the text of a last message of the assistant, which is none of the messages then.
    Messages of the same role that follow each other become one.

    Raises InvalidRequestError for what is not served, such as an image.
    """
    chat: list[Message] = []
    if system:
        chat.append({"role": "system", "content": _text_of("system", system)})
    for index, message in enumerate(messages):
        where = f"messages: message {index}"
        role = message.get("role")
        if not isinstance(role, str) or role not in _SERVED:
            raise _wrong(f"{where}: role {str(role)[:80]!r} is not one of {', '.join(_SERVED)}")
        blocks = _blocks_of(where, message.get("content"), _SERVED[role])
        if role == "user":
            _add_user(chat, where, blocks)
        else:
            _add(chat, _assistant(where, blocks) if role == "assistant" else _plain(role, blocks))
    if not chat or chat[-1]["role"] != "assistant":
        return chat, ""
    last = chat.pop()
    if last.keys() > {"role", "content"}:
        raise _wrong(
            f"messages: message {len(messages) - 1}: is the assistant's and the last one, which"
            " the answer goes on with, so it may have text alone"
        )
    return chat, last["content"]


def _add_user(chat: list[Message], where: str, blocks: Sequence[Mapping[str, Any]]) -> None:
    """Each result of a tool is a message of its own."""
    texts: list[str] = []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            _add(chat, {"role": "user", "content": "".join(texts)})
            texts = []
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise _wrong(f"{where}: a tool_result needs tool_use_id, a text")
        content = _text_of(f"{where}: tool_result", block.get("content") or "")
        chat.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if texts or not blocks:
        _add(chat, {"role": "user", "content": "".join(texts)})


def _assistant(where: str, blocks: Sequence[Mapping[str, Any]]) -> Message:
    message = _plain("assistant", [it for it in blocks if it["type"] == "text"])
    thinking = [it.get("thinking") for it in blocks if it["type"] == "thinking"]
    if not all(isinstance(it, str) for it in thinking):
        raise _wrong(f"{where}: a block of type 'thinking' needs thinking, a text")
    if reasoning := "".join(map(str, thinking)):
        message["reasoning_content"] = reasoning
    calls = [_call(where, it) for it in blocks if it["type"] == "tool_use"]
    return message | ({"tool_calls": calls} if calls else {})


def _plain(role: str, blocks: Sequence[Mapping[str, Any]]) -> Message:
    return {"role": role, "content": "".join(it["text"] for it in blocks)}


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = (block.get(it) for it in ("id", "name", "input"))
    arguments = {} if arguments is None else arguments
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, dict)):
        raise _wrong(f"{where}: a tool_use needs id and name, texts, and input, an object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add(chat: list[Message], message: Message) -> None:
    """Add a message, or put it together with the last one if that has the same role."""
    if not chat or chat[-1]["role"] != message["role"] or message["role"] == "system":
        chat.append(message)
        return
    last = chat[-1]
    texts = [it for it in (last["content"], message["content"]) if it]
    last["content"] = _BETWEEN_TURNS.join(texts)
    for name in ("reasoning_content", "tool_calls"):
        if name in message:
            last[name] = last[name] + message[name] if name in last else message[name]


def _text_of(where: str, content: Any) -> str:
    return "".join(it["text"] for it in _blocks_of(where, content, ("text",)))


def _blocks_of(where: str, content: Any, served: Sequence[str]) -> list[Mapping[str, Any]]:
    """The blocks of a content, all of types that are served. A text is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong(f"{where}: content must be text or a list of blocks")
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else block
        if not isinstance(block, Mapping) or kind not in served:
            raise _wrong(
                f"{where}: a block of type {str(kind)[:80]!r} is not served; served are"
                f" {', '.join(served)}"
            )
        if kind == "text" and not isinstance(block.get("text"), str):
            raise _wrong(f"{where}: a block of type 'text' needs text")
    return content


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=message.partition(":")[0])
