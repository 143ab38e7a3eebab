"""Writes the events of a response's stream, and the whole object at its end.

An event with a piece of text or arguments takes one sequence number for each character of the
piece; any other event takes one number. An event is sent with its last number. So a number
identifies a place in the output, however the text is divided into events. At any gateway, a client
can continue after any number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from promptq.producer.apis.responses.ended_output import EndedOutput, Ending
from promptq.producer.apis.responses.read import NAMES
from promptq.producer.apis.responses.response_call import ResponseCall, Status
from promptq.producer.calls.completion import failure
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.logprobs import chat_logprob
from promptq.producer.calls.output.model_text import ExpectedOutput
from promptq.producer.calls.output.output_text import Kind, OutputPiece, OutputText
from promptq.producer.calls.output.tool_calls import call_id
from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import FinishReason
from promptq.shared.runtime.turns import Work

_STATUSES: dict[FinishReason, Status] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.EXPIRED: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "failed",
}
_LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
"""Type of the stream's last event, by status; `response.incomplete` for any other status."""


class ResponseWriter:
    """Writes a response's events as frames. Skips the events with numbers up to `after`.

    Call `opening`, then `write` for each event of the request, then `end`.
    """

    def __init__(self, call: ResponseCall, after: int = -1) -> None:
        self.whole = ""
        """The response object as JSON once it has ended; empty before."""
        self.items: list[str] = []
        """The finished output items, as JSON."""
        self._call = call
        self._after = after
        self._model = call.model
        self.next_number = 0
        """The sequence number of the next event."""
        self._has_begun = False
        self._text = OutputText(None, ExpectedOutput())
        self._item: _Item | None = None
        self._num_calls = 0
        self._logprobs: list[str] = []  # as JSON, of tokens whose text was not written yet
        self._frames: list[str] = []

    def set_model(self, model: str, style: OutputStyle | None) -> None:
        """Sets the model and its output style. Call this method before `write`."""
        self._model = self._call.model or model
        self._text = OutputText(style, self._call.expected)

    def opening(self) -> str:
        """Returns the frames before any output."""
        first: Status = "queued" if self._call.background else "in_progress"
        self._event("response.created", lambda: f'"response":{self._object(first)}')
        if self._call.background:
            self._event("response.queued", lambda: f'"response":{self._object("queued")}')
        else:
            self._begin()
        return self._take()

    def write(self, text: str, logprobs: Sequence[TokenLogprob] | None) -> str:
        """Returns the frames for the next event of the request."""
        self._begin()
        pieces = self._text.feed(text)
        is_calling = self._item is not None and self._item.kind == "call"
        is_calling = is_calling or any(piece.kind == "call" for piece in pieces)
        if logprobs and self._call.with_logprobs and not is_calling:
            self._logprobs += [json.dumps(chat_logprob(entry)) for entry in logprobs]
        self._write(pieces)
        return self._take()

    def end(self, ending: Ending) -> Iterator[str]:
        """Yields the last frames one by one: each may repeat megabytes of log-probabilities."""
        self._begin()
        self._write(self._text.finish())
        yield self._take()
        status = _STATUSES[ending.finish_reason]
        error = self.failure_of(ending)
        if error is not None and status != "cancelled":
            status = "failed"
        if self._item is None and not self.items and status in ("completed", "incomplete"):
            self._open("content", None)
        if self._item is not None:
            for _ in self._closing("completed" if status == "completed" else "incomplete"):
                yield self._take()
        incomplete = "max_output_tokens" if status == "incomplete" else None
        self.whole = self._call.object(
            status,
            self.items,
            model=self._model,
            usage=ending.usage,
            error=_error_object(error) if error is not None and status == "failed" else None,
            incomplete=incomplete,
            took_ms=ending.took_ms,
        )
        yield self._take()
        name = _LAST_EVENTS.get(status, "response.incomplete")
        self._event(name, lambda: f'"response":{self.whole}')
        yield self._take()

    def failure_of(self, ending: Ending) -> ApiError | None:
        """Returns the error of a request that ended without an answer; None if it has an answer."""
        num_tokens = ending.usage.completion_tokens
        return failure(ending.finish_reason, ending.error, num_tokens, NAMES)

    def _object(self, status: Status) -> str:
        return self._call.object(status, model=self._model)

    def _begin(self) -> None:
        # A response in the background is in progress as soon as it has output.
        if not self._has_begun:
            self._has_begun = True
            self._event("response.in_progress", lambda: f'"response":{self._object("in_progress")}')

    def _write(self, pieces: Sequence[OutputPiece]) -> None:
        for piece in pieces:
            item = self._item
            if item is None or item.kind != piece.kind or piece.name is not None:
                if item is not None:
                    for _ in self._closing("completed"):
                        pass
                self._open(piece.kind, piece.name)
            self._add(piece.text)

    def _open(self, kind: Kind, name: str | None) -> None:
        index = len(self.items)
        item_id = f"{_PREFIXES[kind]}_{self._call.unique}_{index}"
        tool_call_id = ""
        if kind == "call":
            tool_call_id = call_id(self._call.id, self._num_calls)
            self._num_calls += 1
        self._item = item = _Item(kind, item_id, name or "", tool_call_id)
        place = f'"output_index":{index}'
        self._event("response.output_item.added", lambda: f'{place},"item":{item.opening()}')
        if kind != "call":
            part = f'"content_index":0,"part":{item.part("")}'
            self._event(
                "response.content_part.added",
                lambda: f'"item_id":{quoted(item_id)},{place},{part}',
            )

    def _add(self, text: str) -> None:
        assert self._item is not None
        item, first = self._item, self.next_number
        item.texts.append(text)
        logprobs, more = self._logprobs, ""
        if item.kind == "content":
            self._logprobs = []
            item.logprobs += logprobs
        self.next_number += len(text)
        if self.next_number - 1 <= self._after:
            return
        text = text[max(0, self._after + 1 - first) :]
        if item.kind == "content":
            more = f',"logprobs":[{",".join(logprobs)}]'
        self._frame(
            f"response.{_TEXTS[item.kind]}.delta",
            f'{self._place(item)},"delta":{quoted(text)}{more}',
            self.next_number - 1,
        )

    def _closing(self, status: str) -> Iterator[None]:
        assert self._item is not None
        item, self._item = self._item, None
        item.logprobs += self._logprobs
        self._logprobs = []
        place, text = self._place(item), "".join(item.texts)
        name = f"response.{_TEXTS[item.kind]}.done"
        if item.kind == "call":
            called = f'"name":{quoted(item.name)},"arguments":{quoted(text)}'
            self._event(name, lambda: f"{place},{called}")
        else:
            logprobs = ",".join(item.logprobs)
            more = f',"logprobs":[{logprobs}]' if item.kind == "content" else ""
            self._event(name, lambda: f'{place},"text":{quoted(text)}{more}')
            yield
            part = "response.content_part.done"
            self._event(part, lambda: f'{place},"part":{item.part(text, logprobs)}')
        yield
        index, done = len(self.items), item.closing(status)
        self.items.append(done)
        yield
        place = f'"output_index":{index}'
        self._event("response.output_item.done", lambda: f'{place},"item":{done}')
        yield

    def _place(self, item: _Item) -> str:
        place = f'"item_id":{quoted(item.id)},"output_index":{len(self.items)}'
        return place if item.kind == "call" else f'{place},"content_index":0'

    def _event(self, kind: str, members: Callable[[], str]) -> None:
        # `members` is called only if the client has not read the event.
        number, self.next_number = self.next_number, self.next_number + 1
        if number > self._after:
            self._frame(kind, members(), number)

    def _frame(self, kind: str, members: str, number: int) -> None:
        self._frames.append(
            f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{members}}}\n\n'
        )

    def _take(self) -> str:
        frames, self._frames = "".join(self._frames), []
        return frames


_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "content": "msg", "call": "fc"}
_TEXTS: dict[Kind, str] = {
    "reasoning": "reasoning_text",
    "content": "output_text",
    "call": "function_call_arguments",
}


class _Item:
    """An output item that is being written: a message, a function call or reasoning."""

    def __init__(self, kind: Kind, item_id: str, name: str, tool_call_id: str) -> None:
        self.kind = kind
        self.id = item_id
        self.name = name
        self.texts: list[str] = []
        self.logprobs: list[str] = []
        """The log-probabilities of each token as JSON."""
        self._tool_call_id = tool_call_id

    def opening(self) -> str:
        return self._json("in_progress", "", [])

    def closing(self, status: str) -> str:
        text = "".join(self.texts)
        return self._json(status, text, [self.part(text, ",".join(self.logprobs))])

    def part(self, text: str, logprobs: str = "") -> str:
        if self.kind == "reasoning":
            return f'{{"type":"reasoning_text","text":{quoted(text)}}}'
        return (
            f'{{"type":"output_text","text":{quoted(text)},"annotations":[]'
            f',"logprobs":[{logprobs}]}}'
        )

    def _json(self, status: str, text: str, parts: list[str]) -> str:
        head = f'{{"id":{quoted(self.id)},"status":"{status}"'
        content = f'"content":[{",".join(parts)}]'
        match self.kind:
            case "call":
                return (
                    f'{head},"type":"function_call","call_id":{quoted(self._tool_call_id)}'
                    f',"name":{quoted(self.name)},"arguments":{quoted(text)}}}'
                )
            case "reasoning":
                return f'{head},"type":"reasoning","summary":[],{content}}}'
        return f'{head},"type":"message","role":"assistant",{content}}}'


def finished_writer(call: ResponseCall, output: EndedOutput) -> Work[ResponseWriter]:
    """Returns a writer that has `whole` and `items` of an ended response, but no frames."""
    writer = ResponseWriter(call, after=sys.maxsize)
    for _ in frames_of(writer, output):
        yield
    return writer


def frames_of(writer: ResponseWriter, output: EndedOutput) -> Iterator[str]:
    """Yields the frames of a response that has ended. Some frames are empty."""
    writer.set_model(output.model, output.output_style)
    yield writer.opening()
    for piece in output.pieces:
        yield writer.write(piece.text, piece.logprobs)
    yield from writer.end(output.ending)


def error_frame(error: ApiError, number: int) -> str:
    """Returns the event `error`, which reports why a stream ends early."""
    details: Any = error.body["error"]
    shown = {name: details[name] for name in ("code", "message", "param")}
    body = {"type": "error", "sequence_number": number, **shown, "error": details}
    return f"event: error\ndata: {json.dumps(body)}\n\n"


def _error_object(error: ApiError) -> dict[str, Any]:
    # OpenAI's clients know only certain codes, so promptq's code becomes the `type`.
    code = "invalid_prompt" if error.status == 400 else "server_error"
    return {"code": code, "message": str(error), "type": error.code, "param": error.param}
