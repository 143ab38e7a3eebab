"""Keeps the marks around calls and reasoning, such as `<think>`, in the text of a chat's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_style import CHANNELS, OutputStyle
from promptq.shared.protocol.request import Request
from promptq.worker.text.detokenizer import TextStream
from promptq.worker.text.tokenizer import Tokenizer

_SHOWN_CHARS = 80
_TAIL_TOKENS = 16
"""Number of tokens at the end of the prompt that are searched for a mark."""


class OutputMarks:
    """The marks around calls and reasoning, such as `<think>`, in a chat's output. The output's
    text contains these marks, even marks that are special tokens.

    If the prompt ends with the opening mark of reasoning, the output's text begins with this mark
    too. Otherwise clients could not see that the text begins with reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, style: OutputStyle, request: Request, prompt: Sequence[int]
    ) -> None:
        is_shown_tools = bool(request.tools) and request.tool_choice != "none"
        style = style.of_chat(with_tools=is_shown_tools)
        self._tokenizer, self._style, self._prompt = tokenizer, style, prompt
        self._request = request
        is_chat, is_bound = request.messages is not None, request.wanted_output is not None
        self._may_reason = is_chat and not is_bound and bool(style.reasoning_marks)
        marks = style.reasoning_marks if self._may_reason else ()
        # In gpt-oss' form, all text stands between marks, also without calls.
        if is_chat and (is_shown_tools or (style.form == CHANNELS and not is_bound)):
            marks += style.call_marks
        self._marks = marks
        self._decode = tokenizer.decoder(marks)
        self._prefix = ""
        if self._may_reason:
            tail = self._decode(prompt[-_TAIL_TOKENS:]).rstrip()
            if tail.endswith(style.reasoning_before.strip()):
                self._prefix = style.reasoning_before

    def check_stop_strings(self) -> None:
        """Raise InvalidRequestError if a stop string can never be in the output's text."""
        for stop in self._request.stop_strings:
            if self._tokenizer.added_token(stop) is not None:
                continue
            for name in self._tokenizer.special_within(stop):
                if not any(name in mark for mark in self._marks):
                    raise InvalidRequestError(
                        f"stop: {stop[:_SHOWN_CHARS]!r} holds {name!r}, a special token, which is"
                        f" never in a text; {name!r} alone ends the output at that token",
                        field="stop",
                    )

    def text_stream(
        self, prefix_tokens: Sequence[int], events: Sequence[TokenEvent], min_tokens: int
    ) -> tuple[TextStream, str]:
        """Returns the output's text stream and the text of `prefix_tokens`, the output prefix. The
        stream has read these tokens and the `events` of earlier attempts. For `min_tokens`, see
        `TextStream`."""
        emitted = [token_id for event in events for token_id in event.token_ids]
        text = "".join(event.text for event in events)
        stream: TextStream
        begun = ""
        # Earlier releases left the marks out. Outputs that they began continue without marks.
        for decode, prefix in ((self._decode, self._prefix), (self._tokenizer.decode, "")):
            stop = self._request.stop_strings
            stream = TextStream(decode, self._prompt, stop, min_tokens, prefix)
            begun = stream.begin(prefix_tokens)
            if (begun + stream.replay(emitted[len(prefix_tokens) :])).startswith(text):
                break
        return stream, begun

    def reasoning_tokens(self, end_token_ids: frozenset[int]) -> ReasoningTokens | None:
        """Returns a counter of reasoning tokens; None if the output can have no reasoning."""
        if not self._may_reason:
            return None
        return ReasoningTokens(self._style, self._tokenizer, bool(self._prefix), end_token_ids)


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """Counts the tokens of the reasoning between marks, such as `<think>` and `</think>`."""

    style: OutputStyle
    tokenizer: Tokenizer
    is_open: bool
    """Whether the output begins inside of the reasoning."""
    end_token_ids: frozenset[int]

    def count(self, token_ids: Sequence[int], text: str) -> int | None:
        """Returns an output's number of reasoning tokens; None if the number cannot be found."""
        before, after = self.style.reasoning_marks
        first, last = map(self._tokens_of, (before, after))
        begin = 0
        if not self.is_open:
            if not text.lstrip().startswith(before.strip()):
                return 0
            places = range(len(token_ids) - len(first) + 1)
            found = (at for at in places if [*token_ids[at : at + len(first)]] == first)
            at = next(found, None) if first else None
            if at is None or (len(first) > 1 and text.count(before) > 1):
                return None
            begin = at + len(first)
        if len(last) != 1 or token_ids.count(last[0]) != text.count(after.strip()):
            return None
        if last[0] in token_ids[begin:]:
            end = token_ids.index(last[0], begin)
        else:
            is_ended = bool(token_ids) and token_ids[-1] in self.end_token_ids
            end = len(token_ids) - is_ended
        return end - begin

    def _tokens_of(self, mark: str) -> list[int]:
        """Returns the tokens of a mark; an empty list if different tokens can write the mark."""
        single = self.tokenizer.added_token(mark.strip())
        if single is not None:
            return [single]
        return self.tokenizer.encode_output(mark) if self.tokenizer.special_within(mark) else []
