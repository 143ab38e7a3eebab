"""Writes messages in Anthropic's form: whole, and as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

from pydantic_core import from_json, to_json

from promptq.producer.apis.messages.read import NAMES
from promptq.producer.calls.completion import Completion, failure
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.output.output_text import Kind, OutputPiece, OutputText
from promptq.producer.calls.output.tool_calls import call_id
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import FinishReason
from promptq.shared.protocol.urgency import Tier

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Event that keeps the connection open between two other events."""

_DELTAS: dict[Kind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # the delta's type, and its member with the text
_NO_DETAILS = '"stop_details":null,"container":null'
# Clients expect these members, which have no meaning in promptq.
_NO_USAGE = '"cache_creation":null,"server_tool_use":null,"inference_geo":null'
_TIERS: dict[Tier, str] = {"priority": "priority", "default": "standard", "flex": "batch"}
"""Anthropic's names of the service tiers."""
_NO_MARK = "\0"
"""A character that occurs in no mark (such as `<think>`) and is not white space. When the parser
reads this character, it returns all text that it held back as the possible beginning of a mark."""
_BROKEN = "INVALID_JSON"
"""Name of the only member of a tool's input if the model has not written a JSON object. The member
has the text that the model has written."""


class MessageWriter:
    """Writes the frames (server-sent events) of a message, from all events of its request."""

    def __init__(self, completion: Completion, style: OutputStyle | None) -> None:
        self.whole = ""
        """The message as JSON once it has ended; empty before."""
        self._completion = completion
        self._tier = _TIERS[completion.service_tier]
        self._names = {**NAMES, **completion.names}
        self._text = OutputText(style, completion.expected)
        self._prefill = _Prefill(completion, style) if completion.prefill else None
        self._is_open = False
        self._blocks: list[str] = []
        self._block: _Block | None = None
        self._num_calls = 0
        self._num_prefilled = 0  # tokens of the prefill
        self._frames: list[str] = []

    def write(self, event: TokenEvent) -> str:
        """Returns the frames for the next event. Raises ApiError if the request has failed."""
        num_tokens = event.end if event.usage is None else event.usage.completion_tokens
        error = failure(event.finish_reason, event.error, num_tokens, self._names)
        if error is not None:
            raise error
        if not self._is_open:
            self._is_open = True
            stop = '"stop_reason":null,"stop_sequence":null'
            start = self._message("", stop, _usage(Usage(), 0, self._tier))
            self._frame("message_start", f'"message":{start}')
        text = event.text
        if self._prefill is not None and event.index == 0:
            prefill, text = self._prefill.split(event)
            if prefill and not text:
                self._num_prefilled = event.end
            # A part of a call is useless. So if the prefill begins a call, the answer repeats it.
            self._write([piece for piece in self._text.feed(prefill) if piece.kind == "call"])
        self._write(self._without_prefill(self._text.feed(text)))
        if event.finish_reason is not None:
            self._write(self._without_prefill(self._text.finish()))
            self._end(event, event.finish_reason)
        frames, self._frames = "".join(self._frames), []
        return frames

    def _without_prefill(self, pieces: list[OutputPiece]) -> list[OutputPiece]:
        return pieces if self._prefill is None else self._prefill.without(pieces)

    def _end(self, event: TokenEvent, reason: FinishReason) -> None:
        if self._block is not None:
            self._close(self._block)
        sequence = event.stop_reason
        if reason is not FinishReason.STOP:
            stop_reason, sequence = "max_tokens", None
        elif self._num_calls:
            stop_reason, sequence = "tool_use", None
        else:
            stop_reason = "end_turn" if sequence is None else "stop_sequence"
        usage = _usage(event.usage or Usage(), self._num_prefilled, self._tier)
        stop = f'"stop_reason":"{stop_reason}","stop_sequence":{to_json(sequence).decode()}'
        self.whole = self._message(",".join(self._blocks), stop, usage)
        delta = f'"delta":{{{stop},{_NO_DETAILS}}}'
        self._frame("message_delta", f'{delta},"usage":{usage}')
        self._frame("message_stop", "")

    def _write(self, pieces: Sequence[OutputPiece]) -> None:
        for piece in pieces:
            block = self._block
            if block is None or block.kind != piece.kind or piece.name is not None:
                if block is not None:
                    self._close(block)
                self._block = block = self._open(piece)
            if piece.text:
                block.texts.append(piece.text)
                kind, member = _DELTAS[piece.kind]
                delta = f'{{"type":"{kind}","{member}":{quoted(piece.text)}}}'
                self._frame("content_block_delta", f'{self._place},"delta":{delta}')

    def _open(self, piece: OutputPiece) -> _Block:
        tool_use_id = ""
        if piece.kind == "call":
            tool_use_id = call_id(self._completion.id, self._num_calls).replace("call_", "toolu_")
            self._num_calls += 1
        block = _Block(piece.kind, tool_use_id, piece.name or "")
        self._frame("content_block_start", f'{self._place},"content_block":{block.opening()}')
        return block

    def _close(self, block: _Block) -> None:
        self._frame("content_block_stop", self._place)
        self._blocks.append(block.closing())
        self._block = None

    @property
    def _place(self) -> str:
        return f'"index":{len(self._blocks)}'

    def _message(self, blocks: str, stop: str, usage: str) -> str:
        return (
            f'{{"id":{quoted(self._completion.id)},"type":"message","role":"assistant"'
            f',"model":{quoted(self._completion.model)},"content":[{blocks}]'
            f',{stop},{_NO_DETAILS},"usage":{usage}}}'
        )

    def _frame(self, kind: str, members: str) -> None:
        rest = f",{members}" if members else ""
        self._frames.append(f'event: {kind}\ndata: {{"type":"{kind}"{rest}}}\n\n')


class _Prefill:
    """Removes the prefill, the text with which a call makes the output begin, from the output."""

    def __init__(self, completion: Completion, style: OutputStyle | None) -> None:
        self._prefill = completion.prefill
        self._parser = OutputText(style, completion.expected)  # gets only the prefill
        self._mark = "" if style is None else style.reasoning_before
        self._held: OutputPiece | None = None
        """The last part of the prefill. Parsers hold it back, because it may begin a mark."""

    def split(self, event: TokenEvent) -> tuple[str, str]:
        """Splits the text of the first event into the prefill and the rest.

        If the chat template has begun the reasoning, a mark like `<think>` may precede the prefill.
        A missing prefill means that the tokenizer has changed the prefill's text. Then the text of
        the whole event is the prefill, because a worker sends the prefill as one event.
        """
        text = event.text
        at = text.find(self._prefill, 0, len(self._mark) + len(self._prefill))
        end = at + len(self._prefill) if at >= 0 else 0 if event.is_last else len(text)
        self._parser.feed(text[:end])
        for piece in self._parser.feed(_NO_MARK):
            self._held = OutputPiece(piece.kind, piece.text.removesuffix(_NO_MARK))
        return text[:end], text[end:]

    def without(self, pieces: list[OutputPiece]) -> list[OutputPiece]:
        """Removes the last part of the prefill (`_held`) from pieces of the output. The output's
        parser had held back this part, so the first pieces begin with it."""
        output = []
        for piece in pieces:
            held, self._held = self._held, None
            if held is None or held.kind != piece.kind or piece.kind == "call":
                output.append(piece)
                continue
            length = min(len(held.text), len(piece.text))
            if piece.text[:length] != held.text[:length]:
                length = 0
            elif length < len(held.text):
                self._held = OutputPiece(held.kind, held.text[length:])
            if length < len(piece.text):
                output.append(OutputPiece(piece.kind, piece.text[length:]))
        return output


class _Block:
    def __init__(self, kind: Kind, tool_use_id: str, name: str) -> None:
        self.kind = kind
        self.texts: list[str] = []
        self._tool_use_id, self._name = tool_use_id, name

    def opening(self) -> str:
        return self._json("", "{}")

    def closing(self) -> str:
        text = "".join(self.texts)
        return self._json(text, _input_of(text) if self.kind == "call" else "")

    def _json(self, text: str, arguments: str) -> str:
        match self.kind:
            case "call":
                head = f'{{"type":"tool_use","id":"{self._tool_use_id}","name":{quoted(self._name)}'
                return f'{head},"input":{arguments},"caller":{{"type":"direct"}}}}'
            case "reasoning":
                return f'{{"type":"thinking","thinking":{quoted(text)},"signature":""}}'
        return f'{{"type":"text","text":{quoted(text)},"citations":null}}'


def _input_of(arguments: str) -> str:
    # `max_tokens` may have cut off the JSON.
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    return to_json(value if isinstance(value, dict) else {_BROKEN: arguments}).decode()


def _usage(usage: Usage, num_prefilled: int, tier: str) -> str:
    # To Anthropic, tokens of the prefill are input, and cached tokens are not.
    details = "null"
    if usage.reasoning_tokens is not None:
        details = f'{{"thinking_tokens":{usage.reasoning_tokens}}}'
    return (
        f'{{"input_tokens":{max(0, usage.prompt_tokens + num_prefilled - usage.cached_tokens)}'
        f',"cache_creation_input_tokens":0,"cache_read_input_tokens":{usage.cached_tokens}'
        f',"output_tokens":{max(0, usage.completion_tokens - num_prefilled)}'
        f',"output_tokens_details":{details},"service_tier":"{tier}",{_NO_USAGE}}}'
    )


def error_frame(error: ApiError) -> bytes:
    """Returns the event that reports why a stream ends early."""
    return f"event: error\ndata: {json.dumps(error.messages_body)}\n\n".encode("ascii")
