"""The output of a response that has ended, in the form that the response's record stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from pydantic import BaseModel

from promptq.shared.protocol.events import ErrorInfo, Stats, TokenEvent, TokenLogprob, Usage
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime.large_json import object_in
from promptq.shared.runtime.turns import Work

_FEW = 64  # tokens with log-probabilities in one piece
_MOST_MS = 1e12


class StoredPiece(BaseModel):
    """The text of one event, and the log-probabilities of its tokens if the call requests them."""

    text: str
    logprobs: list[TokenLogprob] | None = None


class Ending(BaseModel):
    """How a request ended."""

    finish_reason: FinishReason
    error: ErrorInfo | None = None
    usage: Usage = Usage()
    took_ms: float = 0.0
    """Milliseconds from enqueueing to the end."""


class EndedOutput(BaseModel):
    """The output of an ended response. A client that streams the response again gets one event for
    each piece.

    `model` and `style` (JSON) are those of the queue when the response ended.
    """

    model: str
    style: str | None = None
    pieces: list[StoredPiece]
    ending: Ending

    @classmethod
    def of(cls, events: Sequence[TokenEvent], model: str, style: OutputStyle | None) -> Self:
        """Returns the output of a request that has ended, from all its events."""
        return cls(
            model=model,
            style=None if style is None else style.to_json(),
            pieces=[piece for event in events for piece in _pieces_of(event)],
            ending=ending_of(events[-1]),
        )

    @classmethod
    def failed(cls, error_type: str, message: str) -> Self:
        """Returns an output that has only an error, for a response whose events cannot be read."""
        error = ErrorInfo(type=error_type, message=message)
        ending = Ending(finish_reason=FinishReason.ERROR, error=error)
        return cls(model="", pieces=[], ending=ending)

    @classmethod
    def parse(cls, text: bytes) -> Work[Self]:
        """Parses the JSON of `to_json`. Raises ValueError."""
        fields = yield from object_in(text.decode(), {"pieces": StoredPiece.model_validate})
        return cls.model_validate(fields)

    @property
    def output_style(self) -> OutputStyle | None:
        return None if self.style is None else OutputStyle.from_json(self.style)

    def to_json(self) -> Work[str]:
        rest = self.model_copy(update={"pieces": []}).model_dump_json(exclude_defaults=True)
        pieces = []
        for piece in self.pieces:
            pieces.append(piece.model_dump_json(exclude_defaults=True))
            yield
        return rest.replace('"pieces":[]', f'"pieces":[{",".join(pieces)}]', 1)


def _pieces_of(event: TokenEvent) -> Iterator[StoredPiece]:
    # `to_json` pauses only between pieces, so each piece must be small.
    logprobs = event.logprobs or []
    yield StoredPiece(text=event.text, logprobs=logprobs[:_FEW] or None)
    for begin in range(_FEW, len(logprobs), _FEW):
        yield StoredPiece(text="", logprobs=logprobs[begin : begin + _FEW])


def ending_of(event: TokenEvent) -> Ending:
    """Returns the ending in a request's last event. Raises ValueError for other events."""
    if event.finish_reason is None:
        raise ValueError("the event is not the last one")
    stats = event.stats or Stats()
    took_ms = stats.queue_ms + stats.prompt_ms + stats.generation_ms
    return Ending(
        finish_reason=event.finish_reason,
        error=event.error,
        usage=event.usage or Usage(),
        took_ms=took_ms if 0 <= took_ms < _MOST_MS else 0.0,  # any program may have written it
    )
