"""From a call of /v1/embeddings to its answer."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.responses import Response

from promptq.producer.gateway.answering.completion_stream import learned
from promptq.producer.gateway.answering.disconnects import while_present
from promptq.producer.gateway.answering.respond import Prepared, begin, with_headers
from promptq.producer.gateway.context.access import Caller
from promptq.producer.gateway.context.gateway import Gateway
from promptq.producer.gateway.context.served_queues import ServedQueue
from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import ApiError, ClientLeftError
from promptq.producer.gateway.openai.embeddings import embeddings_json, failure_of_embedding
from promptq.shared.errors import PromptqError
from promptq.shared.protocol.events import Result

_READ_AT_ONCE = 16
"""How many results of a call are waited for at once: each takes a round trip."""


async def respond_embeddings(
    request: Request, gateway: Gateway, caller: Caller, prepared: Prepared, hold: Hold
) -> Response:
    """Enqueue a call and answer it with its vectors. If the client leaves, it is cancelled.

    Releases the hold on the body once its requests are in the queue.
    """
    served, completion, rates = await begin(gateway, caller, prepared)
    prepared.new.clear()
    hold.release()
    try:
        async with while_present(request.receive):
            results = await _results(served, completion.request_ids)
            completion, _ = await learned(served, completion)
            body = await embeddings_json(completion, results)
    except (ClientLeftError, ApiError):
        gateway.cancels.cancel(served.client, completion.request_ids)
        raise
    headers = {**rates, "X-Request-Id": completion.id}
    return with_headers(headers, Response(body, media_type="application/json"))


async def _results(served: ServedQueue, request_ids: list[str]) -> list[Result]:
    """The results of all. Raises ApiError for the first that is no vector, PromptqError."""
    turns = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(request_id: str) -> Result:
        async with turns:
            result = await served.client.result(request_id, check=False)
        if (error := failure_of_embedding(result)) is not None:
            raise error
        return result

    try:
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(read(request_id)) for request_id in request_ids]
    except* (ApiError, PromptqError) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in reading]
