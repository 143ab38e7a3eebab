"""A whole answer, for clients that do not stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from promptq.producer.gateway.http.errors import ApiError
from promptq.producer.gateway.openai.completion import Completion
from promptq.producer.gateway.openai.endings import failure, finish_reason
from promptq.producer.gateway.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    tokens_of_prompt,
)
from promptq.producer.gateway.openai.reading.model_text import read_whole
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.runtime.turns import Work


def answer(
    completion: Completion, results: Sequence[Result], style: OutputStyle | None
) -> Work[dict[str, Any]]:
    """The body of the answer. Raises ApiError if a result is no answer."""
    if (error := failure_of(results)) is not None:
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
    }
    if completion.is_chat and completion.with_prompt_logprobs:  # the choices have one prompt
        body["prompt_logprobs"] = yield from prompt_logprobs(results[0])
    return body


def failure_of(results: Sequence[Result]) -> ApiError | None:
    """The first failure among the results. A deadline is one only if there is no output at all."""
    num_tokens = sum(len(result.token_ids) for result in results)
    found = (failure(result.finish_reason, result.error, num_tokens) for result in results)
    return next((error for error in found if error is not None), None)


def _choice(
    completion: Completion, index: int, result: Result, style: OutputStyle | None
) -> Work[dict[str, Any]]:
    num_calls, logprobs = 0, result.logprobs or []
    body: dict[str, Any]
    if completion.is_chat:
        request_id = completion.request_ids[index]
        read = read_whole(result.text, style, completion.asked, request_id)
        message: dict[str, Any] = {"role": "assistant", "content": read.content}
        message |= {"refusal": None, "annotations": []}
        if read.reasoning:
            message |= {"reasoning_content": read.reasoning, "reasoning": read.reasoning}
        if completion.asked.is_forced or read.calls:
            message["content"] = read.content or None
        if num_calls := len(read.calls):
            message["tool_calls"] = read.calls
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
