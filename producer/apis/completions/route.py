"""Answers calls of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from promptq.producer.apis.completions.positions import Position, read_event_id
from promptq.producer.apis.completions.read import (
    DEFAULT_MAX_TOKENS,
    ChatOptions,
    CompletionOptions,
)
from promptq.producer.apis.completions.stream import CompletionStream
from promptq.producer.apis.completions.write import answer
from promptq.producer.calls.call import CompletionCall, request_ids
from promptq.producer.calls.call_reader import CallReader, Endpoint
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.completion import (
    Completion,
    check_completion_id,
    completion_of,
    failure,
    learned,
)
from promptq.producer.calls.logprobs import freed
from promptq.producer.calls.prepare import Prepared, payloads_of
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.bodies import Hold
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.errors import described
from promptq.producer.http.openapi import TOOL_FIELDS, operation
from promptq.producer.http.state import Gateway, ThisCallReader, ThisGateway
from promptq.producer.http.stream import EventStream
from promptq.producer.http.submit import begin, read_call, with_headers
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import Result
from promptq.shared.runtime.large_json import written
from promptq.shared.runtime.logs import bind

router = APIRouter(
    tags=["completions"],
    responses=described(400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    dependencies=[needs("completions")],
)


@router.post(
    "/v1/chat/completions",
    openapi_extra=operation(ChatOptions, hidden=frozenset()),
    response_class=Response,
)
async def create_chat_completion(
    request: Request, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> Response:
    """Answer a chat, in one piece or, with `stream`, as it is generated."""
    return await _create(request, gateway, caller, call_reader, "chats")


@router.post(
    "/v1/completions",
    openapi_extra=operation(
        CompletionOptions,
        hidden=TOOL_FIELDS,
        descriptions={"max_tokens": f"default: {DEFAULT_MAX_TOKENS}"},
    ),
    response_class=Response,
)
async def create_completion(
    request: Request, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> Response:
    """Continue one prompt or several, in one piece or, with `stream`, as it is generated."""
    return await _create(request, gateway, caller, call_reader, "completions")


async def _create(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    call_reader: CallReader,
    endpoint: Endpoint,
) -> Response:
    last_event_id = request.headers.get("last-event-id")
    check = partial(check_stream, gateway, caller, last_event_id) if last_event_id else None
    async with read_call(request, gateway, caller, call_reader, endpoint, check=check) as read:
        return await respond(request, gateway, caller, *read)


async def respond(
    request: Request, gateway: Gateway, caller: Caller, prepared: Prepared, hold: Hold
) -> Response:
    """Enqueue a call and answer it, or resume a stream that was interrupted."""
    call = prepared.call
    last_event_id = request.headers.get("last-event-id")
    if last_event_id:
        if not call.stream:
            raise InvalidRequestError("Last-Event-ID: needs stream: true", field="Last-Event-ID")
        return await _resume(gateway, call, last_event_id)
    served, completion, rates = await begin(gateway, caller, prepared, hold)
    if call.stream:
        stream = EventStream(gateway, served, CompletionStream(completion), is_new=True)
        return with_headers(rates, stream)
    async with cancelled_if_client_leaves(gateway, request.receive, served, completion):
        return with_headers(rates, await _whole_answer(gateway, served, completion))


async def check_stream(gateway: Gateway, caller: Caller, last_event_id: str) -> None:
    """Check a call that resumes a stream, before its body is read.

    Raises InvalidRequestError, and RequestNotFoundError if the stream is not the caller's.
    """
    completion_id, have = read_event_id(last_event_id)
    check_completion_id(completion_id)
    first, *_ = request_ids(completion_id, len(have))
    await payloads_of(await gateway.queues.holding(first), caller, [first])


async def _resume(gateway: Gateway, call: CompletionCall, last_event_id: str) -> Response:
    completion_id, have = read_event_id(last_event_id)
    bind(request_id=completion_id)
    served = await gateway.queues.holding(request_ids(completion_id, len(have))[0])
    completion = completion_of(call, completion_id, (await served.watch.look()).model)
    check_positions(completion, have)
    return EventStream(gateway, served, CompletionStream(completion, have))


def check_positions(completion: Completion, have: list[Position]) -> None:
    """Raises InvalidRequestError unless there is one position for each choice."""
    if len(have) != completion.num_choices:
        raise InvalidRequestError(
            f"Last-Event-ID: has {len(have)} positions for {completion.num_choices} choices",
            field="Last-Event-ID",
        )


async def _whole_answer(gateway: Gateway, served: ServedQueue, completion: Completion) -> Response:
    results: list[Result] = []
    for request_id in completion.request_ids:
        result = await served.client.result(request_id, check=False)
        if failure(result.finish_reason, result.error, num_tokens=1) is not None:
            gateway.cancels.cancel(served.client, completion.request_ids[len(results) + 1 :])
            results = [result] * completion.num_choices
            break
        results.append(result)
    completion, style = await learned(served, completion)
    turns = served.client.turns
    body = await turns.run(answer(completion, results, style))
    headers = {"X-Request-Id": completion.id, "X-Stream-Url": completion.url}
    text = await turns.run(written(body))
    for result in results:
        await turns.run(freed(result))
    return Response(text, headers=headers, media_type="application/json")
