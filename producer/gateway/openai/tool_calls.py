"""Calls of tools as OpenAI's clients get them."""

from __future__ import annotations

import hashlib
from typing import Any

from producer.gateway.openai.tool_text import ToolText
from shared.tool_call_style import ToolCallStyle


def call_id(request_id: str, index: int) -> str:
    """The id of a request's call: the same, whoever reads it and how often."""
    digest = hashlib.sha256(f"{request_id}\n{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def split_calls(
    text: str, style: ToolCallStyle | None, request_id: str
) -> tuple[str, list[dict[str, Any]]]:
    """The content of a whole text, and the calls in it."""
    tools = ToolText(style)
    content, deltas = tools.feed(text)
    content += tools.finish()
    calls = [
        {
            "id": call_id(request_id, delta.index),
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }
        for delta in deltas
    ]
    return content, calls
