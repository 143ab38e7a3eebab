"""Streams by their addresses, for clients that come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from promptq.producer.clients.forks import fork_source
from promptq.producer.gateway.answering.completion_stream import CompletionStream
from promptq.producer.gateway.answering.event_stream import EventStream
from promptq.producer.gateway.answering.reading.call_reader import ThisCallReader
from promptq.producer.gateway.answering.reading.forks import (
    MOST_BYTES,
    ForkOptions,
    fork_call,
    read_fork,
)
from promptq.producer.gateway.answering.respond import check_positions, respond
from promptq.producer.gateway.answering.respond_message import MessageStream
from promptq.producer.gateway.answering.stored_payloads import payloads_of
from promptq.producer.gateway.context.access import Caller, ThisCaller, needs
from promptq.producer.gateway.context.caller_rates import COUNTED_READ, admit_call
from promptq.producer.gateway.context.gateway import Gateway, ThisGateway
from promptq.producer.gateway.context.served_queues import ServedQueue
from promptq.producer.gateway.http.bodies import read_body
from promptq.producer.gateway.http.errors import described
from promptq.producer.gateway.openai.completion import (
    Completion,
    check_completion_id,
    is_message_id,
    needed_request_ids,
    stream_completion,
)
from promptq.producer.gateway.openai.read_positions import read_event_id
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.queue import scripts
from promptq.shared.queue.call import carry_out_async
from promptq.shared.runtime.logs import bind

router = APIRouter(
    tags=["streams"],
    responses=described(400, 401, 403, 404, 503),
    dependencies=[needs("completions")],
)

_BY_WEIGHT = (CancelStatus.FLAGGED, CancelStatus.CANCELLED)
"""What a completion with several answers reports, if one of them has this status."""


@router.get(
    "/v1/streams/{completion_id}",
    response_class=Response,
    dependencies=[COUNTED_READ],
    responses=described(429),
)
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
    if is_message_id(completion_id):
        return EventStream(gateway, served, MessageStream(completion))  # its events have no ids
    if not last_event_id:
        return EventStream(gateway, served, CompletionStream(completion))
    of_completion, have = read_event_id(last_event_id)
    if of_completion != completion_id:
        raise InvalidRequestError("Last-Event-ID: belongs to another stream", field="Last-Event-ID")
    check_positions(completion, have)
    return EventStream(gateway, served, CompletionStream(completion, have))


@router.post(
    "/v1/streams/{completion_id}/fork",
    openapi_extra={
        "requestBody": {
            "content": {"application/json": {"schema": ForkOptions.model_json_schema()}}
        }
    },
    responses=described(403, 408, 409, 413, 429),
    response_class=Response,
)
async def fork_stream(
    completion_id: str,
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
    call_reader: ThisCallReader,
) -> Response:
    """Go on from the first tokens of a completion, as a new one that is answered like the first.

    The completion may run or have ended. The fork's output begins with the tokens and the text that
    it goes on from, and the header `X-Forked-From` says where that is.
    """
    if request.headers.get("last-event-id"):
        raise InvalidRequestError(
            "Last-Event-ID: continue a fork at the address of its own stream", field="Last-Event-ID"
        )
    await admit_call(gateway, caller)
    with gateway.bodies.hold(caller.party) as hold:
        options = read_fork(await read_body(request, MOST_BYTES, hold))
        check_completion_id(completion_id)
        request_id = options.request_id(completion_id)
        served = await gateway.queues.holding(request_id)
        await payloads_of(served, caller, [request_id])
        source = await carry_out_async(fork_source(served.queue.keys, request_id), served.queue.run)
        model = (await served.watch.look()).model
        call = fork_call(source, options, request.headers, caller, model)
        hold.grow_to(len(call.body))
        aliases = await gateway.queues.aliases()
        prepared = await call_reader.prepare(
            "chats" if call.is_chat else "completions",
            [call.body],
            request.headers,
            caller,
            aliases,
        )
        new = [replace(it, forked_from=call.point) for it in prepared.new]
        prepared = replace(prepared, new=new)
        response = await respond(request, gateway, caller, prepared, hold)
    response.headers["X-Forked-From"] = str(call.point)
    return response


@router.delete("/v1/streams/{completion_id}")
async def cancel_stream(
    completion_id: str, request: Request, gateway: ThisGateway, caller: ThisCaller
) -> dict[str, object]:
    """Cancel a completion, such as one that goes on without its client.

    `status` is `cancelled`, `flagged` (its workers end it now) or `finished` (it had ended).
    """
    served, completion = await _find(gateway, caller, completion_id, request)
    statuses = await served.queue.run(scripts.cancel(completion.request_ids))
    status = next((one for one in _BY_WEIGHT if one in statuses), CancelStatus.FINISHED)
    is_cancelled = status is not CancelStatus.FINISHED
    return {"id": completion.id, "object": "stream", "cancelled": is_cancelled, "status": status}


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
