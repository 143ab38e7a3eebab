"""The output of a response that is over, as it is kept when the queue has forgotten it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict

from promptq.shared.errors import SpoiltRecordError
from promptq.shared.protocol.events import ErrorInfo, TokenEvent, TokenLogprob, Usage
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import FinishReason


class Piece(BaseModel):
    """The text of one event, and the log-probabilities of its tokens, if they were asked for."""

    model_config = ConfigDict(extra="ignore")

    text: str
    logprobs: list[TokenLogprob] | None = None


class Ending(BaseModel):
    """How a request ended."""

    model_config = ConfigDict(extra="ignore")

    finish_reason: FinishReason
    error: ErrorInfo | None = None
    usage: Usage = Usage()


class EndedOutput(BaseModel):
    """All that was written, event by event, so that a stream of it is the same as it was.

    `model` and `style` are those of the queue then, the style as JSON.
    """

    model_config = ConfigDict(extra="ignore")

    model: str
    style: str | None = None
    pieces: list[Piece]
    ending: Ending

    @classmethod
    def of(cls, events: Sequence[TokenEvent], model: str, style: OutputStyle | None) -> Self:
        """Of all events of a request, its last event included."""
        return cls(
            model=model,
            style=None if style is None else style.to_json(),
            pieces=[Piece(text=it.text, logprobs=it.logprobs) for it in events],
            ending=ending_of(events[-1]),
        )

    @property
    def output_style(self) -> OutputStyle | None:
        return None if self.style is None else OutputStyle.from_json(self.style)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_defaults=True)


def ending_of(event: TokenEvent) -> Ending:
    """What the last event of a request says."""
    if event.finish_reason is None:
        raise ValueError("the event is not the last one")
    return Ending(
        finish_reason=event.finish_reason, error=event.error, usage=event.usage or Usage()
    )


def not_kept() -> EndedOutput:
    """The output of a response whose request the queue does not know any more."""
    return _none("not_kept", "the queue forgot the output before a gateway could keep it")


def spoilt(error: SpoiltRecordError) -> EndedOutput:
    """The output of a response whose request has a record that a stranger spoilt."""
    return _none("spoilt_record", str(error))


def _none(error_type: str, message: str) -> EndedOutput:
    error = ErrorInfo(type=error_type, message=message)
    ending = Ending(finish_reason=FinishReason.ERROR, error=error)
    return EndedOutput(model="", pieces=[], ending=ending)
