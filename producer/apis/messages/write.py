"""A message, whole and as the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

from pydantic_core import from_json, to_json

from promptq.producer.apis.messages.read import NAMES
from promptq.producer.calls.completion import Completion, failure
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.output.output_text import Kind, OutputText, Piece
from promptq.producer.calls.output.tool_calls import call_id
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import FinishReason

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Sent while nothing else is."""

_DELTAS: dict[Kind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a block's delta, and the member that has its text."""
_NO_DETAILS = '"stop_details":null,"container":null'
_NO_USAGE = '"cache_creation":null,"server_tool_use":null,"service_tier":null,"inference_geo":null'
"""Members of Anthropic's objects that clients expect and that have no meaning here."""
_NO_MARK = "\0"
"""A letter of no mark, nor white space: what might have become a mark before it has not."""
_BROKEN = "INVALID_JSON"
"""The one member of an input that the model wrote as anything but an object."""


class MessageWriter:
    """Writes frames (server-sent events) from all events of a request, in their order."""

    def __init__(self, completion: Completion, style: OutputStyle | None) -> None:
        self.whole = ""
        """The message as JSON, once it has ended."""
        self._completion = completion
        self._text = OutputText(style, completion.asked)
        self._given = _Given(completion, style) if completion.prefill else None
        self._is_open = False
        self._blocks: list[str] = []
        self._block: _Block | None = None
        self._num_calls = 0
        self._num_given = 0  # tokens that the call gave
        self._frames: list[str] = []

    def write(self, event: TokenEvent) -> str:
        """The frames for an event. Raises ApiError if it ends the request without an answer."""
        if event.is_last and (error := _failure_of(event)) is not None:
            raise error
        if not self._is_open:
            self._is_open = True
            start = self._message("", "null", "null", _usage(Usage(), 0))
            self._frame("message_start", f'"message":{start}')
        text = event.text
        if self._given is not None and event.index == 0:
            given, text = self._given.split(event)
            if given and not text:
                self._num_given = event.end
            # A call is only of use as a whole, so that one belongs to the answer.
            self._write([piece for piece in self._text.feed(given) if piece.kind == "call"])
        self._write(self._own(self._text.feed(text)))
        if event.finish_reason is not None:
            self._write(self._own(self._text.finish()))
            self._end(event, event.finish_reason)
        frames, self._frames = "".join(self._frames), []
        return frames

    def _own(self, pieces: list[Piece]) -> list[Piece]:
        """Without what the call gave."""
        return pieces if self._given is None else self._given.without(pieces)

    def _end(self, event: TokenEvent, reason: FinishReason) -> None:
        if self._block is not None:
            self._close(self._block)
        stop = event.stop_reason
        if reason is not FinishReason.STOP:
            told, stop = "max_tokens", None
        elif self._num_calls:
            told, stop = "tool_use", None
        else:
            told = "end_turn" if stop is None else "stop_sequence"
        sequence, usage = to_json(stop).decode(), _usage(event.usage or Usage(), self._num_given)
        self.whole = self._message(",".join(self._blocks), f'"{told}"', sequence, usage)
        delta = f'"delta":{{"stop_reason":"{told}","stop_sequence":{sequence},{_NO_DETAILS}}}'
        self._frame("message_delta", f'{delta},"usage":{usage}')
        self._frame("message_stop", "")

    def _write(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            block = self._block
            if block is None or block.kind != piece.kind or piece.name is not None:
                if block is not None:
                    self._close(block)
                self._block = block = self._opened(piece)
            if piece.text:
                block.texts.append(piece.text)
                kind, member = _DELTAS[piece.kind]
                delta = f'{{"type":"{kind}","{member}":{quoted(piece.text)}}}'
                self._frame("content_block_delta", f'{self._place},"delta":{delta}')

    def _opened(self, piece: Piece) -> _Block:
        called = ""
        if piece.kind == "call":
            called = call_id(self._completion.id, self._num_calls).replace("call_", "toolu_")
            self._num_calls += 1
        block = _Block(piece.kind, called, piece.name or "")
        self._frame("content_block_start", f'{self._place},"content_block":{block.begun()}')
        return block

    def _close(self, block: _Block) -> None:
        self._frame("content_block_stop", self._place)
        self._blocks.append(block.done())
        self._block = None

    @property
    def _place(self) -> str:
        return f'"index":{len(self._blocks)}'

    def _message(self, blocks: str, stop_reason: str, stop_sequence: str, usage: str) -> str:
        return (
            f'{{"id":{quoted(self._completion.id)},"type":"message","role":"assistant"'
            f',"model":{quoted(self._completion.model)},"content":[{blocks}]'
            f',"stop_reason":{stop_reason},"stop_sequence":{stop_sequence},{_NO_DETAILS}'
            f',"usage":{usage}}}'
        )

    def _frame(self, kind: str, members: str) -> None:
        rest = f",{members}" if members else ""
        self._frames.append(f'event: {kind}\ndata: {{"type":"{kind}"{rest}}}\n\n')


class _Given:
    """The beginning of an output that the call gave. It is read, but not shown."""

    def __init__(self, completion: Completion, style: OutputStyle | None) -> None:
        self._prefill = completion.prefill
        self._alone = OutputText(style, completion.asked)
        self._mark = "" if style is None else style.reasoning_before
        self._held: Piece | None = None
        """Its end, which may still come as output, since it might have become a mark."""

    def split(self, event: TokenEvent) -> tuple[str, str]:
        """The text of the first event: what was given, and what follows it.

        The mark of reasoning that the chat template has opened may come before. A worker sends
        what was given as one event, so a tokenizer that writes it in another way does no harm.
        """
        text = event.text
        at = text.find(self._prefill, 0, len(self._mark) + len(self._prefill))
        end = at + len(self._prefill) if at >= 0 else 0 if event.is_last else len(text)
        self._alone.feed(text[:end])
        for piece in self._alone.feed(_NO_MARK):
            self._held = Piece(piece.kind, piece.text.removesuffix(_NO_MARK))
        return text[:end], text[end:]

    def without(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces without what was held back of the given text."""
        own = []
        for piece in pieces:
            held, self._held = self._held, None
            if held is None or held.kind != piece.kind or piece.kind == "call":
                own.append(piece)
                continue
            length = min(len(held.text), len(piece.text))
            if piece.text[:length] != held.text[:length]:
                length = 0
            elif length < len(held.text):
                self._held = Piece(held.kind, held.text[length:])
            if length < len(piece.text):
                own.append(Piece(piece.kind, piece.text[length:]))
        return own


class _Block:
    """A block of the content that is being written."""

    def __init__(self, kind: Kind, called: str, name: str) -> None:
        self.kind = kind
        self.texts: list[str] = []
        self._called, self._name = called, name

    def begun(self) -> str:
        return self._json("", "{}")

    def done(self) -> str:
        text = "".join(self.texts)
        return self._json(text, _input_of(text) if self.kind == "call" else "")

    def _json(self, text: str, given: str) -> str:
        match self.kind:
            case "call":
                head = f'{{"type":"tool_use","id":"{self._called}","name":{quoted(self._name)}'
                return f'{head},"input":{given},"caller":{{"type":"direct"}}}}'
            case "reasoning":
                return f'{{"type":"thinking","thinking":{quoted(text)},"signature":""}}'
        return f'{{"type":"text","text":{quoted(text)},"citations":null}}'


def _input_of(arguments: str) -> str:
    """The arguments of a call as a JSON object. What `max_tokens` cut is as far as it came."""
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        found = None
    return to_json(found if isinstance(found, dict) else {_BROKEN: arguments}).decode()


def _failure_of(event: TokenEvent) -> ApiError | None:
    """The error of a request that ended without an answer."""
    num_tokens = event.usage.completion_tokens if event.usage is not None else event.end
    return failure(event.finish_reason, event.error, num_tokens, NAMES)


def _usage(usage: Usage, num_given: int) -> str:
    """The usage as Anthropic counts it: cached tokens apart, and the given output as input."""
    details = "null"
    if usage.reasoning_tokens is not None:
        details = f'{{"thinking_tokens":{usage.reasoning_tokens}}}'
    return (
        f'{{"input_tokens":{max(0, usage.prompt_tokens + num_given - usage.cached_tokens)}'
        f',"cache_creation_input_tokens":0,"cache_read_input_tokens":{usage.cached_tokens}'
        f',"output_tokens":{max(0, usage.completion_tokens - num_given)}'
        f',"output_tokens_details":{details},{_NO_USAGE}}}'
    )


def error_frame(error: ApiError) -> bytes:
    """An event that says why a stream breaks off."""
    return f"event: error\ndata: {json.dumps(error.messages_body)}\n\n".encode("ascii")
