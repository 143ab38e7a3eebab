"""Changes fields of messages to the form that the chat templates of some model families read.

A client may send call ids that a gateway or another model made, and a template may refuse them.
APIs and templates also have different names for the field with the reasoning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from promptq.worker.text.content_form import Message

_ID_LENGTH = 9


def with_fields_of(template: str, messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with call ids and reasoning in the form that the template reads."""
    filled = list(messages)
    if "<|tool_call_argument_begin|>" in template:
        filled = _renamed(filled, _name_and_number)
    elif "[TOOL_CALLS]" in template:
        filled = _renamed(filled, _nine_letters)
    if "message.thinking" in template:
        filled = [_with_thinking(message) for message in filled]
    return filled


def _renamed(
    messages: Sequence[Message], new_id: Callable[[dict[str, Any], int], str]
) -> list[Message]:
    """Returns the messages with new call ids, both in calls and in results of calls."""
    ids: dict[Any, str] = {}
    renamed = []
    num_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            clean = []
            for call in calls:
                ids[call.get("id")] = new_id(call, num_calls)
                clean.append({**call, "id": ids[call.get("id")]})
                num_calls += 1
            message = {**message, "tool_calls": clean}
        elif (id_ := message.get("tool_call_id")) is not None and id_ in ids:
            message = {**message, "tool_call_id": ids[id_]}
        renamed.append(message)
    return renamed


def _name_and_number(call: dict[str, Any], number: int) -> str:
    """Returns a call id as Kimi writes it. `number` counts the calls of the chat from 0."""
    return f"functions.{call['function']['name']}:{number}"


def _nine_letters(call: dict[str, Any], number: int) -> str:
    """Returns a call id of nine letters and digits, as Mistral's templates require."""
    own = call.get("id")
    if isinstance(own, str) and len(own) == _ID_LENGTH and own.isalnum() and own.isascii():
        return own
    return hashlib.sha256(f"{own}\n{number}".encode()).hexdigest()[:_ID_LENGTH]


def _with_thinking(message: Message) -> Message:
    """Returns the message with its reasoning in the field that gpt-oss' template reads. A message
    with both calls and content does not change, because the template would refuse the field."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    has_both = message.get("tool_calls") and message.get("content")
    if not reasoning or has_both or "thinking" in message:
        return message
    return {**message, "thinking": reasoning}
