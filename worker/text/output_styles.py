"""Detects how a model family writes tool calls and reasoning, from the model's templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.output_style import (
    CHANNELS,
    ELEMENTS,
    LITERALS,
    NAMED,
    TAGGED,
    OutputStyle,
)

if TYPE_CHECKING:
    from promptq.worker.text.tokenizer import HuggingFaceTokenizer

AUTO = "auto"
_DEEPSEEK = OutputStyle(
    form=NAMED,
    opening="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
)
_DSML = OutputStyle(
    form=ELEMENTS,
    opening="<｜DSML｜function_calls>\n",
    before='<｜DSML｜invoke name="',
    middle='">\n',
    key_before='<｜DSML｜parameter name="',
    key_after='" string="true">',
    key_after_json='" string="false">',
    value_after="</｜DSML｜parameter>\n",
    after="</｜DSML｜invoke>\n",
    closing="</｜DSML｜function_calls>",
)
_GLM = OutputStyle(
    form=ELEMENTS,
    before="<tool_call>",
    middle="\n",
    key_before="<arg_key>",
    key_after="</arg_key>\n<arg_value>",
    value_after="</arg_value>\n",
    after="</tool_call>",
)
_HERMES = OutputStyle(before="<tool_call>\n", after="\n</tool_call>")
_LLAMA = OutputStyle(arguments_key="parameters", between="; ", prelude="<|python_tag|>")
_STYLES = (
    # For each family: its name, texts in its template, and its style. A template that has all of
    # these texts belongs to the family. If several families match, the first one counts.
    (
        "gpt-oss",
        ("<|channel|>analysis<|message|>", "<|start|>assistant"),
        OutputStyle(
            form=CHANNELS,
            opening="<|start|>",
            before="<|channel|>",
            middle="<|message|>",
            closing="<|end|>",
            prelude=" to=functions.",
            after="<|call|>",
            reasoning_before="<|channel|>analysis<|message|>",
            reasoning_after="<|end|>",
        ),
    ),
    (
        "deepseek-v3",  # and R1
        ("<｜tool▁calls▁begin｜>", "```json"),
        replace(
            _DEEPSEEK,
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
        ),
    ),
    ("deepseek-v3.1", ("<｜tool▁calls▁begin｜>",), _DEEPSEEK),
    ("deepseek-v3.2", ("｜DSML｜", "function_calls>"), _DSML),
    (
        "deepseek-v4",
        ("｜DSML｜", "tool_calls>"),
        replace(_DSML, opening="<｜DSML｜tool_calls>\n", closing="</｜DSML｜tool_calls>"),
    ),
    (
        "kimi-k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
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
        "gemma-4",
        ("<|tool_call>call:", "<tool_call|>"),
        OutputStyle(
            form=LITERALS,
            before="<|tool_call>call:",
            middle="{",
            key_after=":",
            after="}<tool_call|>",
            quote='<|"|>',
        ),
    ),
    (
        "minimax-m2",
        ("<minimax:tool_call>", "<invoke name="),
        OutputStyle(
            form=ELEMENTS,
            opening="<minimax:tool_call>\n",
            before='<invoke name="',
            middle='">\n',
            key_before='<parameter name="',
            key_after='">',
            value_after="</parameter>\n",
            after="</invoke>\n",
            closing="</minimax:tool_call>",
        ),
    ),
    (
        "mistral-numbered",  # a call may have an id
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        OutputStyle(form=NAMED, before="[TOOL_CALLS]", name_end="[CALL_ID]", middle="[ARGS]"),
    ),
    (
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        OutputStyle(form=NAMED, before="[TOOL_CALLS]", middle="[ARGS]"),
    ),
    (
        "mistral-v3",
        ("[TOOL_CALLS] [",),
        OutputStyle(before="[TOOL_CALLS] [", between=", ", after="]"),
    ),
    (
        "mistral-v7",
        ("[TOOL_CALLS]",),
        OutputStyle(before="[TOOL_CALLS][", between=", ", after="]"),
    ),
    (
        "qwen3-coder",  # and Qwen 3.5
        ("<tool_call>", "<function=", "<parameter="),
        OutputStyle(
            form=TAGGED,
            opening="<tool_call>\n<function=",
            middle=">\n",
            key_before="<parameter=",
            key_after=">\n",
            value_after="\n</parameter>\n",
            closing="</function>\n</tool_call>",
        ),
    ),
    ("glm-4.5", ("<tool_call>", "</arg_key>\n<arg_value>"), _GLM),
    (
        "glm-4.7",
        ("<tool_call>", "</arg_key><arg_value>"),
        replace(_GLM, middle="", key_after="</arg_key><arg_value>", value_after="</arg_value>"),
    ),
    ("hermes", ("<tool_call>", '"name"'), _HERMES),
    (
        "pythonic",  # Llama 3.2 and 4 with a template that teaches calls in Python
        ("[func_name1(",),
        OutputStyle(
            form=LITERALS,
            opening="[",
            middle="(",
            key_after="=",
            after=")",
            between=", ",
            closing="]",
            prelude="<|python_start|>",
        ),
    ),
    (
        "llama-4",
        ('"parameters": dictionary of argument', "<|python_end|>"),
        replace(_LLAMA, prelude="<|python_end|>"),
    ),
    ("llama-3", ('"parameters": dictionary of argument',), _LLAMA),
    (
        "command-r",
        ('"tool_name": title of the tool', "Action:", "```json"),
        OutputStyle(
            name_key="tool_name",
            arguments_key="parameters",
            before="Action: ```json\n[",
            between=", ",
            after="]```",
        ),
    ),
)
_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
)


def style_of(tokenizer: HuggingFaceTokenizer, name: str = AUTO) -> OutputStyle:
    """Returns the form of a model's tool calls and reasoning, from the model's chat templates.

    If `name` is the name of a model family, tool calls have the form of that family. Raises
    ConfigurationError for an unknown name.
    """
    chats = tokenizer.chats
    with_tools, without = (
        output_style(chats.template(with_tools=shown), chats.response_template, name)
        for shown in (True, False)
    )
    if without.reasoning_marks == with_tools.reasoning_marks:
        return with_tools
    return replace(with_tools, without_tools=without)


def output_style(
    chat_template: str, response_template: Any = None, name: str = AUTO
) -> OutputStyle:
    """Returns the form in which a model with this chat template writes tool calls and reasoning. If
    no known family has this template, calls are bare JSON.

    If transformers' `response_template` has literal marks, these replace the family's marks. `name`
    is as in `style_of`.
    """
    shown = chat_template.replace('\\"', '"').replace("\\n", "\n")  # escaped in template strings
    style = _named(name) or next(
        (style for _, marks, style in _STYLES if all(mark in shown for mark in marks)),
        OutputStyle(),
    )
    for before, after in _REASONING:
        if after in chat_template and style.form != CHANNELS:
            style = replace(style, reasoning_before=before, reasoning_after=after)
    if name != AUTO or style.form == CHANNELS:
        return style
    return _with_response_template(style, response_template)


def _named(name: str) -> OutputStyle | None:
    """Returns a family's style; None for AUTO. Raises ConfigurationError for an unknown name."""
    if name == AUTO:
        return None
    styles = {known: style for known, _, style in _STYLES}
    if name not in styles:
        raise ConfigurationError(
            f"--output-style: {name!r} is not known; known are {AUTO}, {', '.join(styles)}"
        )
    return styles[name]


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
    """Returns a field's mark `open` or `close`; None if the mark is a pattern of several texts."""
    if not isinstance(field, Mapping):
        return None
    if isinstance(words := field.get(name), str):
        return words
    pattern = field.get(f"{name}_pattern")
    words = pattern.replace(r"\s*", "") if isinstance(pattern, str) else None
    return words if words and re.escape(words).replace(r"\-", "-") == words else None


def _is_object(field: Mapping[str, Any]) -> bool:
    """Whether a call is the plain JSON {"name": NAME, "arguments": {...}}."""
    plain = ({"type": "function", "function": "{content}"}, None)
    return field.get("content") == "json" and field.get("transform") in plain
