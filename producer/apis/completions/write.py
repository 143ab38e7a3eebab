"""Writes the answers of completions and chats in OpenAI's form: whole, or as chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from promptq.producer.apis.completions.positions import Position
from promptq.producer.calls.completion import Completion, failure, finish_reason
from promptq.producer.calls.logprobs import (
    FirstToken,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    text_length,
    tokens_of_prompt,
)
from promptq.producer.calls.output.model_text import ModelText, Piece, read_whole
from promptq.producer.calls.output.tool_calls import ToolDelta, chat_call
from promptq.shared.protocol.events import Result, TokenEvent, TokenLogprob, Usage
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.runtime.large_json import written
from promptq.shared.runtime.turns import Work, at_once

_FEW = 16
"""Log-probabilities of up to this many tokens are written without a pause for other tasks."""


def answer(
    completion: Completion, results: Sequence[Result], style: OutputStyle | None
) -> Work[dict[str, Any]]:
    """Returns the body of the answer. Raises ApiError if a request has failed. A missed deadline
    counts as a failure only if no request has output."""
    num_tokens = sum(len(result.token_ids) for result in results)
    for result in results:
        error = failure(result.finish_reason, result.error, num_tokens, completion.names)
        if error is not None:
            raise error
    choices = []
    for index, result in enumerate(results):
        choices.append((yield from _choice(completion, index, result, style)))
    body: dict[str, Any] = {
        "id": completion.id,
        "object": "chat.completion" if completion.is_chat else "text_completion",
        "created": completion.created,
        "model": completion.model,
        "choices": choices,
        "usage": completion.usage([result.usage for result in results]),
        "service_tier": completion.service_tier,
    }
    if completion.is_chat and completion.with_prompt_logprobs:  # the choices have one prompt
        body["prompt_logprobs"] = yield from prompt_logprobs(results[0])
    return body


def _choice(
    completion: Completion, index: int, result: Result, style: OutputStyle | None
) -> Work[dict[str, Any]]:
    num_calls, logprobs = 0, result.logprobs or []
    body: dict[str, Any]
    if completion.is_chat:
        request_id = completion.request_ids[index]
        read = read_whole(result.text, style, completion.expected)
        message: dict[str, Any] = {"role": "assistant", "content": read.content}
        message |= {"refusal": None, "annotations": []}
        if read.reasoning:
            message |= {"reasoning_content": read.reasoning, "reasoning": read.reasoning}
        if completion.expected.is_forced or read.calls:
            message["content"] = read.content or None
        if num_calls := len(read.calls):
            message["tool_calls"] = [chat_call(request_id, delta) for delta in read.calls]
        body, shown = {"message": message}, (yield from chat_logprobs(logprobs))
    else:
        text, tokens = result.text, [*logprobs]
        if completion.echo_only:
            text, tokens = "", []
        if completion.echoes:
            echo = completion.echoes[index]
            text = ("".join(result.prompt_texts or ()) if echo is None else echo) + text
        of_prompt = tokens_of_prompt(result) if completion.echoes else []
        body = {"text": text}
        shown = yield from completion_logprobs([*of_prompt, *tokens], 0)
        if completion.with_prompt_logprobs:
            body["prompt_logprobs"] = yield from prompt_logprobs(result)
    return {
        "index": index,
        **body,
        "logprobs": shown if completion.with_logprobs else None,
        "finish_reason": finish_reason(result.finish_reason, num_calls, completion.echo_only),
    }


class ChoiceWriter:
    """Writes one choice's chunks. Reads all events, but skips what the client has read (`have`)."""

    def __init__(
        self, completion: Completion, index: int, have: Position, style: OutputStyle | None
    ) -> None:
        self.position = "0-0" if have.is_start else str(have)
        """The client's position after all chunks so far."""
        self.usage: Usage | None = None
        """The usage of the choice; None until it has ended."""
        self._have = have
        self._is_chat = completion.is_chat
        self._with_logprobs = completion.with_logprobs
        self._request_id = completion.request_ids[index]
        self._reader = ModelText(style if completion.is_chat else None, completion.expected)
        self._echoes, self._echo_only = bool(completion.echoes), completion.echo_only
        self._echo = (completion.echoes[index] if completion.echoes else None) or ""
        self._is_first = have.is_start and not _roles_come_first(completion)
        self._num_chars = 0
        self._offset = 0
        self._before, self._after = _frame_of(completion)
        self._before += f'{{"index":{index},'

    def chunk(self, event: TokenEvent) -> str | None:
        """Returns the chunk for an event as JSON; None if the client has read all of the event."""
        if (news := self._news(event)) is None:
            return None
        text, logprobs = news
        return self._chunk(event, text, at_once(self._logprobs(logprobs)) if logprobs else None)

    def chunk_in_parts(self, event: TokenEvent) -> Work[str | None]:
        """Works like `chunk`, but pauses for other tasks if there are many log-probabilities."""
        if (news := self._news(event)) is None:
            return None
        text, logprobs = news
        return self._chunk(event, text, (yield from self._logprobs(logprobs)))

    def _news(self, event: TokenEvent) -> tuple[str, list[FirstToken | TokenLogprob]] | None:
        """Returns an event's unread text and log-probabilities; None if the client has all."""
        have, text, logprobs = self._have, event.text, event.logprobs or []
        if self._echo_only:
            text, logprobs = "", []
        of_prompt = tokens_of_prompt(event) if self._echoes else []
        if of_prompt and not self._echo:  # the call has the prompt as token ids
            self._echo = "".join(event.prompt_texts or ())
        chars_before, self._num_chars = self._num_chars, self._num_chars + len(text)
        if event.finish_reason is not None:
            self.usage = event.usage or Usage()
        if event.index < have.tokens or have.ended:
            # The client has read some of this text, but the parser of calls must read it again.
            self._reader.feed(text[: max(0, have.chars - chars_before)])
            known = logprobs[: have.tokens - event.index]
            self._offset += text_length([*of_prompt, *known])
            of_prompt = []
            logprobs = logprobs[len(known) :]
            text = text[max(0, have.chars - chars_before) :]
            if have.ended or (event.end <= have.tokens and not event.is_last):
                return None
        return text, [*of_prompt, *logprobs]

    def _chunk(self, event: TokenEvent, text: str, logprobs: str | None) -> str | None:
        """Returns a chunk as JSON; None if the chunk would be empty. `logprobs` is JSON."""
        piece = self._reader.feed(text)
        is_last = event.is_last
        if is_last:
            piece += self._reader.finish()
        if not (piece or logprobs or is_last):
            return None
        reason = "null"
        if event.finish_reason is not None:
            num_calls = self._reader.num_calls
            reason = f'"{finish_reason(event.finish_reason, num_calls, self._echo_only)}"'
        shown = logprobs or "null"
        self.position = f"{event.end}-{self._num_chars}{'e' if is_last else ''}"
        body = self._delta(piece) if self._is_chat else self._text(piece.content)
        self._is_first = False
        return f'{self._before}{body},"logprobs":{shown},"finish_reason":{reason}}}{self._after}'

    def _delta(self, piece: Piece) -> str:
        parts = []
        if self._is_first:
            parts.append('"role":"assistant"')
        if piece.reasoning:
            reasoning = quoted(piece.reasoning)
            parts.append(f'"reasoning_content":{reasoning},"reasoning":{reasoning}')
        if piece.content or (self._is_first and not piece):
            parts.append(f'"content":{quoted(piece.content)}')
        if piece.calls:
            parts.append(f'"tool_calls":{json.dumps([self._call(delta) for delta in piece.calls])}')
        return f'"delta":{{{",".join(parts)}}}'

    def _text(self, text: str) -> str:
        return f'"text":{quoted(self._echo + text if self._is_first else text)}'

    def _call(self, delta: ToolDelta) -> dict[str, Any]:
        if delta.name is None:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        return {"index": delta.index, **chat_call(self._request_id, delta)}

    def _logprobs(self, logprobs: list[FirstToken | TokenLogprob]) -> Work[str | None]:
        if not logprobs:
            return None
        if not self._with_logprobs:
            return "null"
        if self._is_chat:
            shown = yield from chat_logprobs(
                one for one in logprobs if isinstance(one, TokenLogprob)
            )
        else:
            offset, self._offset = self._offset, self._offset + text_length(logprobs)
            shown = yield from completion_logprobs(logprobs, offset)
        return (yield from written(shown)) if len(logprobs) > _FEW else json.dumps(shown)


def is_large(event: TokenEvent) -> bool:
    """Returns whether the event has the log-probabilities of many tokens."""
    return len(event.logprobs or ()) + len(event.prompt_logprobs or ()) > _FEW


def role_chunks(completion: Completion, have: Sequence[Position]) -> list[str]:
    """Returns the first chunks of a chat with several choices: one chunk for each choice's role.

    The chunks are in order, because OpenAI's `chat.completions.stream` appends choices to a list.
    """
    if not (_roles_come_first(completion) and all(position.is_start for position in have)):
        return []
    before, after = _frame_of(completion)
    rest = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    return [f'{before}{{"index":{index},{rest}{after}' for index in range(completion.num_choices)]


def usage_chunk(completion: Completion, usages: list[Usage]) -> str:
    """Returns the last chunk for clients that request the usage."""
    before, _ = _frame_of(completion)
    return f'{before}],"usage":{json.dumps(completion.usage(usages))}}}'


def _roles_come_first(completion: Completion) -> bool:
    return completion.is_chat and completion.num_choices > 1


def _frame_of(completion: Completion) -> tuple[str, str]:
    """Returns the parts of a chunk's JSON that come before and after the chunk's only choice."""
    kind = "chat.completion.chunk" if completion.is_chat else "text_completion"
    before = (
        f'{{"id":{quoted(completion.id)},"object":"{kind}","created":{completion.created}'
        f',"model":{quoted(completion.model)},{_tier_of(completion)}"choices":['
    )
    return before, '],"usage":null}' if completion.include_usage else "]}"


def _tier_of(completion: Completion) -> str:
    # Each chunk has it, so the usual one is left out.
    tier = completion.service_tier
    return "" if tier == "default" else f'"service_tier":"{tier}",'
