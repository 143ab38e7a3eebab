"""Streams by their addresses, for clients that come back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from promptq.producer.gateway.answering.completion_stream import CompletionStream
from promptq.producer.gateway.answering.event_stream import EventStream
from promptq.producer.gateway.answering.respond import check_positions
from promptq.producer.gateway.answering.stored_payloads import payloads_of
from promptq.producer.gateway.context.access import Caller, ThisCaller, needs
from promptq.producer.gateway.context.gateway import Gateway, ThisGateway
from promptq.producer.gateway.context.served_queues import ServedQueue
from promptq.producer.gateway.http.errors import described
from promptq.producer.gateway.openai.completion import (
    Completion,
    needed_request_ids,
    stream_completion,
)
from promptq.producer.gateway.openai.read_positions import read_event_id
from promptq.shared.errors import InvalidRequestError
from promptq.shared.runtime.logs import bind

router = APIRouter(
    tags=["streams"],
    responses=described(400, 401, 403, 404, 503),
    dependencies=[needs("completions")],
)


@router.get("/v1/streams/{completion_id}", response_class=Response)
async def read_stream(
    completion_id: str,
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Read the stream of a completion, from its beginning or after the event `Last-Event-ID`.

    The header `X-Stream-Url` of the completion is the address, including the query.
    """
    served, completion = await _find(gateway, caller, completion_id, request)
    if not last_event_id:
        return EventStream(gateway, served, CompletionStream(completion))
    of_completion, have = read_event_id(last_event_id)
    if of_completion != completion_id:
        raise InvalidRequestError("Last-Event-ID: belongs to another stream", field="Last-Event-ID")
    check_positions(completion, have)
    return EventStream(gateway, served, CompletionStream(completion, have))


@router.delete("/v1/streams/{completion_id}")
async def cancel_stream(
    completion_id: str, request: Request, gateway: ThisGateway, caller: ThisCaller
) -> dict[str, object]:
    """Cancel a completion, such as one that goes on without its client."""
    served, completion = await _find(gateway, caller, completion_id, request)
    for request_id in completion.request_ids:
        await served.client.cancel(request_id)
    return {"id": completion.id, "object": "stream", "cancelled": True}


async def _find(
    gateway: Gateway, caller: Caller, completion_id: str, request: Request
) -> tuple[ServedQueue, Completion]:
    query = request.query_params
    request_ids = needed_request_ids(completion_id, query)
    bind(request_id=completion_id)
    served = await gateway.queues.holding(request_ids[0])
    payloads = await payloads_of(served, caller, request_ids)
    view = await served.watch.look()
    return served, stream_completion(completion_id, query, payloads, view.model)
