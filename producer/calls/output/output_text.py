"""Parses a model's text into pieces of reasoning, content and calls, in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from promptq.producer.calls.output import model_text
from promptq.producer.calls.output.model_text import ExpectedOutput, ModelText
from promptq.shared.protocol.output_style import OutputStyle

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of reasoning, content or a tool call. A call's first piece has the tool's `name`."""

    kind: Kind
    text: str
    name: str | None = None


class OutputText:
    """Parser of a model's text. The division of the text among calls of `feed` does not matter."""

    def __init__(self, style: OutputStyle | None, expected: ExpectedOutput) -> None:
        self._reader = ModelText(style, expected)

    def feed(self, text: str) -> list[OutputPiece]:
        """Reads more text. Returns new pieces. Holds back text that may begin a mark."""
        if self._reader.is_plain:
            return [OutputPiece("content", text)] if text else []
        pieces: list[OutputPiece] = []
        for letter in text:  # one by one, because a piece of `ModelText` does not order its parts
            pieces += _in_order(self._reader.feed(letter))
        return _joined(pieces)

    def finish(self) -> list[OutputPiece]:
        """Ends the text. Returns the pieces that `feed` has held back."""
        return _joined(_in_order(self._reader.finish()))


def _in_order(read: model_text.Piece) -> list[OutputPiece]:
    pieces = [OutputPiece("reasoning", read.reasoning)] if read.reasoning else []
    pieces += [OutputPiece("content", read.content)] if read.content else []
    return pieces + [OutputPiece("call", delta.arguments, delta.name) for delta in read.calls]


def _joined(pieces: list[OutputPiece]) -> list[OutputPiece]:
    joined: list[OutputPiece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind and piece.name is None:
            last = joined.pop()
            piece = OutputPiece(last.kind, last.text + piece.text, last.name)
        joined.append(piece)
    return joined
