"""Answers calls of /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from promptq.producer.apis.embeddings.read import EmbeddingOptions, RerankOptions, ScoreOptions
from promptq.producer.apis.embeddings.write import (
    embeddings_json,
    failure_of_embedding,
    rerank_json,
    scores_json,
)
from promptq.producer.calls.call_reader import Endpoint
from promptq.producer.calls.completion import Completion, with_model_and_style
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.errors import described
from promptq.producer.http.openapi import TOOL_FIELDS, operation
from promptq.producer.http.state import ThisGateway
from promptq.producer.http.submit import read_call, with_headers
from promptq.shared.protocol.events import Result

router = APIRouter(
    tags=["completions"],
    responses=described(400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    dependencies=[needs("completions")],
)
_READ_AT_ONCE = 16  # results; each takes a round trip


@router.post(
    "/v1/embeddings",
    openapi_extra=operation(EmbeddingOptions, hidden=TOOL_FIELDS),
    response_class=Response,
)
async def create_embeddings(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """Turn one text or several into vectors."""
    return await _answer(request, gateway, caller, "embeddings", embeddings_json)


@router.post(
    "/v1/rerank",
    openapi_extra=operation(RerankOptions, hidden=TOOL_FIELDS),
    response_class=Response,
)
async def rerank(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """Sort documents by how well they answer a query."""
    return await _answer(request, gateway, caller, "reranks", rerank_json)


@router.post(
    "/v1/score",
    openapi_extra=operation(ScoreOptions, hidden=TOOL_FIELDS),
    response_class=Response,
)
async def score(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """Compare one text with others."""
    return await _answer(request, gateway, caller, "scores", scores_json)


async def _answer(
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
    endpoint: Endpoint,
    write: Callable[[Completion, list[Result]], Awaitable[bytes]],
) -> Response:
    async with read_call(request, gateway, caller, endpoint) as incoming:
        served, completion, rates = await incoming.begin()
    async with cancelled_if_client_leaves(
        gateway, request.receive, served, completion, errors=(ApiError,)
    ):
        results = await _results(served, completion)
        completion, _ = await with_model_and_style(served, completion)
        body = await write(completion, results)
    headers = {**rates, "X-Request-Id": completion.id}
    return with_headers(headers, Response(body, media_type="application/json"))


async def _results(served: ServedQueue, completion: Completion) -> list[Result]:
    turns = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(request_id: str) -> Result:
        async with turns:
            result = await served.client.result(request_id, check=False)
        if (error := failure_of_embedding(completion, result)) is not None:
            raise error
        return result

    try:
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(read(request_id)) for request_id in completion.request_ids]
    except ExceptionGroup as errors:  # Python 3.11.2 would put the error of an `except*` in a group
        raise errors.exceptions[0] from None
    return [task.result() for task in reading]
