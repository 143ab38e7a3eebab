"""Parses a model's text into reasoning, content and calls, as a whole or piece by piece.

The result does not depend on where the text was divided. So a stream can be read again, and its
parsed pieces together equal the result for the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptq.producer.calls.output.channels import ChannelText
from promptq.producer.calls.output.reasoning import ReasoningText
from promptq.producer.calls.output.tool_calls import (
    ParameterTypes,
    ToolDelta,
    ToolText,
    merged,
)
from promptq.shared.protocol.output_style import CHANNELS, OutputStyle
from promptq.shared.protocol.schema_types import types_of


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """The kinds of output that a chat allows."""

    with_tools: bool = False
    """Whether the prompt describes tools to the model."""
    is_forced: bool = False
    """Whether the model must call a tool, so that the whole output is a call."""
    with_reasoning: bool = False
    """Whether the output may begin with reasoning. False if a call or a format is required."""
    types: ParameterTypes = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ExpectedOutput:
        """Returns the kinds of output that the fields of a chat's payload allow."""
        tools, choice = fields.get("tools"), fields.get("tool_choice")
        wanted = fields.get("response_format")
        is_json = isinstance(wanted, Mapping) and wanted.get("type") != "text"
        with_tools = bool(tools) and choice != "none"
        is_forced = with_tools and choice not in (None, "auto")
        return cls(
            with_tools=with_tools,
            is_forced=is_forced,
            with_reasoning=not (is_forced or is_json),
            types=_types(tools) if with_tools and isinstance(tools, Sequence) else {},
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A parsed piece of a model's text."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def __add__(self, later: Piece) -> Piece:
        """Joins two successive pieces. The result has one delta for each tool call."""
        return Piece(
            self.reasoning + later.reasoning,
            self.content + later.content,
            merged([*self.calls, *later.calls]),
        )


class ModelText:
    """Parser of a model's text, piece by piece. Without a `style`, all of the text is content."""

    def __init__(self, style: OutputStyle | None, expected: ExpectedOutput) -> None:
        self._reasoning: ReasoningText | None = None
        self._tools: ToolText | None = None
        self._channels: ChannelText | None = None
        style = style and style.of_chat(with_tools=expected.with_tools)
        if style is not None and style.form == CHANNELS:
            if style.has_calls and (expected.with_tools or expected.with_reasoning):
                self._channels = ChannelText(
                    style, with_tools=expected.with_tools, forced=expected.is_forced
                )
            return
        if style is not None and expected.with_reasoning and style.reasoning_marks:
            self._reasoning = ReasoningText(style.reasoning_before, style.reasoning_after)
        if style is not None and expected.with_tools and style.has_calls:
            self._tools = ToolText(style, forced=expected.is_forced, types=expected.types)

    @property
    def is_plain(self) -> bool:
        """Whether all of the text is content."""
        return self._reasoning is None and self._tools is None and self._channels is None

    @property
    def num_calls(self) -> int:
        """Number of tool calls that were found so far."""
        calls = self._channels or self._tools
        return calls.num_calls if calls is not None else 0

    def feed(self, text: str) -> Piece:
        """Reads more text. Returns a new piece. Holds back text that may begin a mark."""
        if self._channels is not None:
            return Piece(*self._channels.feed(text))
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        return self._answer(reasoning, text)

    def finish(self) -> Piece:
        """Ends the text. Returns reasoning, content and calls that `feed` has held back."""
        if self._channels is not None:
            return Piece(*self._channels.finish())
        reasoning, text = "", ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
        piece = self._answer(reasoning, text)
        return piece if self._tools is None else piece + Piece("", *self._tools.finish())

    def _answer(self, reasoning: str, text: str) -> Piece:
        if self._tools is None:
            return Piece(reasoning, text)
        return Piece(reasoning, *self._tools.feed(text))


def read_whole(text: str, style: OutputStyle | None, expected: ExpectedOutput) -> Piece:
    """Returns the reasoning, content and calls of a complete text."""
    reader = ModelText(style, expected)
    return reader.feed(text) + reader.finish()


def needed_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the small part of a payload's `fields` that `ExpectedOutput.of` needs.

    `ExpectedOutput.of` returns equal objects for `fields` and for the returned part.
    """
    expected = ExpectedOutput.of(fields)
    needed: dict[str, Any] = {}
    if expected.with_tools:
        needed["tools"] = [
            {"function": {"name": name, "parameters": {"properties": _schemas(types)}}}
            for name, types in expected.types.items()
        ] or [{}]
        needed["tool_choice"] = "required" if expected.is_forced else "auto"
    if not (expected.with_reasoning or expected.is_forced):
        needed["response_format"] = {"type": "json_object"}
    return needed


def _schemas(types: Mapping[str, frozenset[str]]) -> dict[str, dict[str, list[str]]]:
    return {name: {"type": sorted(of_one)} for name, of_one in types.items()}


def _types(tools: Sequence[Any]) -> dict[str, dict[str, frozenset[str]]]:
    by_tool: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        of_one = by_tool.setdefault(function["name"], {})
        for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
            of_one[name] = types_of(schema, parameters)
    return by_tool
