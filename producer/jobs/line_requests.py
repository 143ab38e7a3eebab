"""From a line's body to requests, and from their results to the body of an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio

from producer.composing import compose, compose_samples
from producer.jobs.batch_lines import BatchLine
from shared.errors import InvalidRequestError
from shared.keys import Keys
from shared.schemas import Result, Usage
from shared.scripts import NewRequest


class LineForm(Protocol):
    """How lines become requests."""

    def requests(
        self, line: BatchLine, request_id: str, defaults: dict[str, Any]
    ) -> list[NewRequest]:
        """What is to be enqueued for a line; `defaults` are fields that its body may override.

        Raises InvalidRequestError.
        """

    async def answer(
        self, line: BatchLine, request_id: str, results: Sequence[Result]
    ) -> dict[str, Any]:
        """The body of the HTTP answer, as if the line had been a request to the gateway."""


class PlainForm:
    """Bodies are the fields of a request, with `n` beside them."""

    def requests(
        self, line: BatchLine, request_id: str, defaults: dict[str, Any]
    ) -> list[NewRequest]:
        body = dict(line.body)
        if body.pop("stream", False):
            raise InvalidRequestError("stream: a batch does not stream", field="stream")
        n = body.pop("n", None)
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        body.pop("user", None)
        fields = {**defaults, **body, "request_id": request_id}
        if n is None or n == 1:
            return compose([fields])
        if not isinstance(n, int):
            raise InvalidRequestError(f"n: {n!r} is not a number", field="n")
        return compose_samples(n, fields)

    async def answer(
        self, line: BatchLine, request_id: str, results: Sequence[Result]
    ) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, result in enumerate(results):
            choice: dict[str, Any] = {"index": index, "finish_reason": result.finish_reason.value}
            if line.is_chat:
                choice["message"] = {"role": "assistant", "content": result.text}
            else:
                choice["text"] = result.text
            choices.append({**choice, "logprobs": None})
        usage = Usage.of_samples([result.usage for result in results])
        return {
            "id": request_id,
            "object": "chat.completion" if line.is_chat else "text_completion",
            "created": int(time.time()),
            "model": line.body.get("model") or "",
            "choices": choices,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
            },
        }


def line_form(connection: redis.asyncio.Redis, keys: Keys, url: str) -> LineForm:
    """How lines of batches for this queue become requests; `url` names the server in errors."""
    return PlainForm()
