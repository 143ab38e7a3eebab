"""Finds out from a chat template how its model family writes the call of a tool."""

from __future__ import annotations

from promptq.shared.protocol.tool_call_style import ToolCallStyle


def tool_call_style(chat_template: str) -> ToolCallStyle:
    """The style of tool calls in a chat template, or bare JSON if it has no style known here.

    Hermes and Qwen put the JSON into <tool_call> tags. Qwen's coder models put XML there, which is
    another style. Llama 3 says `parameters` instead of `arguments`.
    """
    if "<tool_call>" in chat_template and "<function=" not in chat_template:
        return ToolCallStyle(before="<tool_call>\n", after="\n</tool_call>")
    if '"parameters": dictionary of argument' in chat_template:
        return ToolCallStyle(arguments_key="parameters")
    return ToolCallStyle()
