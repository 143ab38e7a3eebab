"""From a line's body to requests and back to an answer, as the gateway does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio

from producer.composing import compose
from producer.jobs.batch_lines import BatchLine
from shared.errors import InvalidRequestError
from shared.events import Result
from shared.keys import Keys
from shared.script_values import NewRequest


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


def line_form(connection: redis.asyncio.Redis, keys: Keys, url: str) -> LineForm:
    """How lines of batches for this queue become requests; `url` names the server in errors."""
    # Here and not above, for it brings the whole of FastAPI along.
    from producer.gateway.openai.answers import answer
    from producer.gateway.openai.calls import Call, read_chat, read_completion
    from producer.gateway.openai.completion import completion_of
    from producer.gateway.queue_view import QueueWatch

    watch = QueueWatch(connection, keys, url)

    def call_of(line: BatchLine) -> Call:
        body = json.dumps(line.body).encode()
        call = read_chat(body, {}) if line.is_chat else read_completion(body, {})
        if call.stream:
            raise InvalidRequestError("stream: a batch does not stream", field="stream")
        return call

    class _GatewayForm:
        def requests(
            self, line: BatchLine, request_id: str, defaults: dict[str, Any]
        ) -> list[NewRequest]:
            call = call_of(line)
            return compose(call.with_fields(**{**defaults, **call.fields}).requests(request_id))

        async def answer(
            self, line: BatchLine, request_id: str, results: Sequence[Result]
        ) -> dict[str, Any]:
            view = await watch.look()
            completion = completion_of(call_of(line), request_id, view.model)
            style = view.tool_call_style if completion.with_tools else None
            return answer(completion, results, style)

    return _GatewayForm()
