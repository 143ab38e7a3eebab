"""Splits what a model writes into the parts of a response's output, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from promptq.producer.gateway.openai.tool_calls import ToolText
from promptq.shared.protocol.tool_call_style import ToolCallStyle

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class Piece:
    """More text of one part. The first piece of a call has its `name`."""

    kind: Kind
    text: str
    name: str | None = None


class OutputText:
    """Reads a text in any pieces. Where parts begin and end depends on the text alone."""

    def __init__(self, style: ToolCallStyle | None, with_tools: bool) -> None:
        self._tools = ToolText(style) if with_tools else None

    def feed(self, text: str) -> list[Piece]:
        """What is certain now."""
        if self._tools is None:
            return [Piece("content", text)] if text else []
        pieces: list[Piece] = []
        for letter in text:  # one by one, as the search does not tell what came first
            content, deltas = self._tools.feed(letter)
            if content:
                pieces.append(Piece("content", content))
            pieces += [Piece("call", delta.arguments, delta.name) for delta in deltas]
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """What was held back when the text ended."""
        content = self._tools.finish() if self._tools is not None else ""
        return [Piece("content", content)] if content else []


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind and piece.name is None:
            last = joined.pop()
            piece = Piece(last.kind, last.text + piece.text, last.name)
        joined.append(piece)
    return joined
