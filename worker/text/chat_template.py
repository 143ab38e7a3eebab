"""Detects how a model family writes tool calls and reasoning, from the model's templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from promptq.shared.protocol.output_style import NAMED, TAGGED, OutputStyle

if TYPE_CHECKING:
    from promptq.worker.text.tokenizer import HuggingFaceTokenizer

_DEEPSEEK = OutputStyle(
    form=NAMED,
    opening="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
)
_STYLES = (
    # All of these are in the template of the family, and of the families the first one counts.
    (
        ("<｜tool▁calls▁begin｜>", "```json"),  # DeepSeek V3 and R1
        replace(
            _DEEPSEEK,
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
        ),
    ),
    (("<｜tool▁calls▁begin｜>",), _DEEPSEEK),  # DeepSeek V3.1
    (
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),  # Kimi K2
        OutputStyle(
            form=NAMED,
            opening="<|tool_calls_section_begin|>",
            before="<|tool_call_begin|>functions.",
            name_end=":",
            middle="<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
        ),
    ),
    (
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),  # Mistral, which may number a call
        OutputStyle(form=NAMED, before="[TOOL_CALLS]", name_end="[CALL_ID]", middle="[ARGS]"),
    ),
    (("[TOOL_CALLS]", "[ARGS]"), OutputStyle(form=NAMED, before="[TOOL_CALLS]", middle="[ARGS]")),
    (("[TOOL_CALLS] [",), OutputStyle(before="[TOOL_CALLS] [", between=", ", after="]")),
    (("[TOOL_CALLS]",), OutputStyle(before="[TOOL_CALLS][", between=", ", after="]")),
    (
        ("<tool_call>", "<function=", "<parameter="),  # Qwen's coders, and Qwen 3.5
        OutputStyle(
            form=TAGGED,
            opening="<tool_call>\n<function=",
            middle=">",
            key_before="<parameter=",
            key_after=">",
            value_after="</parameter>",
            closing="</function>\n</tool_call>",
        ),
    ),
    (("<tool_call>", '"name"'), OutputStyle(before="<tool_call>\n", after="\n</tool_call>")),
    (
        ('"parameters": dictionary of argument',),  # Llama 3
        OutputStyle(arguments_key="parameters", between="; ", prelude="<|python_tag|>"),
    ),
    (
        ('"tool_name": title of the tool', "Action:", "```json"),  # Command R
        OutputStyle(
            name_key="tool_name",
            arguments_key="parameters",
            before="Action: ```json\n[",
            between=", ",
            after="]```",
        ),
    ),
)
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def style_of(tokenizer: HuggingFaceTokenizer) -> OutputStyle:
    """Returns the style of a model's chats, from the templates that render them."""
    with_tools, without = (
        output_style(tokenizer.chat_template(with_tools=shown), tokenizer.response_template)
        for shown in (True, False)
    )
    if without.reasoning_marks == with_tools.reasoning_marks:
        return with_tools
    return replace(with_tools, without_tools=without)


def output_style(chat_template: str, response_template: Any = None) -> OutputStyle:
    """Returns the style of a model's texts, with calls in bare JSON by default.

    A `response_template` of `transformers` has precedence for marks that it states literally. Marks
    that it states as patterns come from the chat template.
    """
    shown = chat_template.replace('\\"', '"')  # a mark may be in a text of the template
    style = next(
        (style for marks, style in _STYLES if all(mark in shown for mark in marks)),
        OutputStyle(),
    )
    for before, after in _REASONING:
        if after in chat_template:
            style = replace(style, reasoning_before=before, reasoning_after=after)
    return _with_response_template(style, response_template)


def _with_response_template(style: OutputStyle, response_template: Any) -> OutputStyle:
    fields = response_template.get("fields") if isinstance(response_template, Mapping) else None
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        before, after = _words(field, "open"), _words(field, "close")
        if before is None or after is None:
            continue
        if name in ("thinking", "reasoning", "reasoning_content"):
            style = replace(style, reasoning_before=before, reasoning_after=after)
        elif name == "tool_calls" and _is_object(field):
            style = OutputStyle(
                before=before,
                after=after,
                reasoning_before=style.reasoning_before,
                reasoning_after=style.reasoning_after,
            )
    return style


def _words(field: Any, name: str) -> str | None:
    """Returns the mark that opens or closes a field; None if only a search would find it."""
    if not isinstance(field, Mapping):
        return None
    if isinstance(words := field.get(name), str):
        return words
    pattern = field.get(f"{name}_pattern")
    words = pattern.replace(r"\s*", "") if isinstance(pattern, str) else None
    return words if words and re.escape(words).replace(r"\-", "-") == words else None


def _is_object(field: Mapping[str, Any]) -> bool:
    """Whether a call is the JSON {"name": NAME, "arguments": {...}}, without a transform."""
    plain = ({"type": "function", "function": "{content}"}, None)
    return field.get("content") == "json" and field.get("transform") in plain
