"""Fills fields of messages in the form that the chat templates of some families read.

A client may send ids of calls from a gateway or from another model, and a template may refuse them.
APIs and templates also have different names for the field of reasoning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
_LONGEST_ID = 9


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
    """Returns the messages with new call ids, in the calls and in the results that name them."""
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
    """Returns a call id as Kimi writes it, with the number of the call in the chat."""
    return f"functions.{call['function']['name']}:{number}"


def _nine_letters(call: dict[str, Any], number: int) -> str:
    """Returns a call id of nine letters and digits, as Mistral's templates require."""
    own = call.get("id")
    if isinstance(own, str) and len(own) == _LONGEST_ID and own.isalnum() and own.isascii():
        return own
    return hashlib.sha256(f"{own}\n{number}".encode()).hexdigest()[:_LONGEST_ID]


def _with_thinking(message: Message) -> Message:
    """Returns the message with its reasoning under the name that gpt-oss' template reads.

    In a message with calls, this template reads the content as reasoning, and refuses a message
    that has both. Such a message does not change.
    """
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    has_both = message.get("tool_calls") and message.get("content")
    if not reasoning or has_both or "thinking" in message:
        return message
    return {**message, "thinking": reasoning}
