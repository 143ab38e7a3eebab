"""Answers calls of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from promptq.producer.apis.completions.positions import Position, event_id, read_event_id
from promptq.producer.apis.completions.read import (
    DEFAULT_MAX_TOKENS,
    ChatOptions,
    CompletionOptions,
)
from promptq.producer.apis.completions.write import (
    ChoiceWriter,
    answer,
    is_large,
    role_chunks,
    usage_chunk,
)
from promptq.producer.calls.call import CompletionCall, request_ids
from promptq.producer.calls.call_body import wrong_field
from promptq.producer.calls.call_reader import Endpoint
from promptq.producer.calls.call_to_payloads import payloads_of
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.completion import (
    Completion,
    check_completion_id,
    completion_of,
    failure,
    with_model_and_style,
)
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.logprobs import free_logprobs
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.connection_limits import Unfinished
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.errors import described
from promptq.producer.http.openapi import TOOL_FIELDS, operation
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.producer.http.stream import EventStream, Frames, Out
from promptq.producer.http.submit import IncomingCall, read_call, with_headers
from promptq.shared.protocol.events import Result, TokenEvent, Usage
from promptq.shared.runtime.large_json import written
from promptq.shared.runtime.logs import bind

_DONE = b"data: [DONE]\n\n"

router = APIRouter(
    tags=["completions"],
    responses=described(400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    dependencies=[needs("completions")],
)


CHAT = operation(ChatOptions)
COMPLETION = operation(
    CompletionOptions,
    hidden=TOOL_FIELDS,
    descriptions={"max_tokens": f"default: {DEFAULT_MAX_TOKENS}"},
)


@router.post("/v1/chat/completions", openapi_extra=CHAT, response_class=Response)
async def create_chat_completion(
    request: Request, gateway: ThisGateway, caller: ThisCaller
) -> Response:
    """Answer a chat: as one object, or with `stream`, piece by piece."""
    return await _create(request, gateway, caller, "chats")


@router.post("/v1/completions", openapi_extra=COMPLETION, response_class=Response)
async def create_completion(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """Continue one prompt or several: as one object, or with `stream`, piece by piece."""
    return await _create(request, gateway, caller, "completions")


async def _create(
    request: Request, gateway: Gateway, caller: Caller, endpoint: Endpoint
) -> Response:
    last_event_id = request.headers.get("last-event-id")
    check = partial(check_stream, gateway, caller, last_event_id) if last_event_id else None
    async with read_call(request, gateway, caller, endpoint, check=check) as incoming:
        return await respond(incoming)


async def respond(incoming: IncomingCall) -> Response:
    """Enqueues a call and returns the answer, or resumes an interrupted stream
    (`Last-Event-ID`)."""
    call, request, gateway = incoming.prepared.call, incoming.request, incoming.gateway
    if last_event_id := request.headers.get("last-event-id"):
        if not call.stream:
            raise wrong_field("Last-Event-ID", "needs stream: true")
        return await _resume(gateway, call, last_event_id)
    served, completion, rates = await incoming.begin()
    if call.stream:
        return with_headers(rates, stream_of(gateway, served, completion, is_new=True))
    async with cancelled_if_client_leaves(gateway, request.receive, served, completion):
        return with_headers(rates, await _whole_answer(gateway, served, completion))


async def check_stream(gateway: Gateway, caller: Caller, last_event_id: str) -> None:
    """Checks a call that resumes a stream, before the call's body is read. Raises
    InvalidRequestError if `last_event_id` is no id of an event, and RequestNotFoundError if the
    stream is unknown or does not belong to the caller."""
    completion_id, have = read_event_id(last_event_id)
    check_completion_id(completion_id)
    first, *_ = request_ids(completion_id, len(have))
    await payloads_of(gateway.queues, caller, [first])


async def _resume(gateway: Gateway, call: CompletionCall, last_event_id: str) -> Response:
    completion_id, have = read_event_id(last_event_id)
    bind(request_id=completion_id)
    served = await gateway.queues.holding(request_ids(completion_id, len(have))[0])
    completion = completion_of(call, completion_id, (await served.view()).model)
    return stream_of(gateway, served, completion, have)


async def _whole_answer(gateway: Gateway, served: ServedQueue, completion: Completion) -> Response:
    results: list[Result] = []
    for request_id in completion.request_ids:
        result = await served.client.result(request_id, check=False)
        if failure(result.finish_reason, result.error, num_tokens=1) is not None:
            gateway.cancels.cancel(served.client, completion.request_ids[len(results) + 1 :])
            results = [result] * completion.num_choices
            break
        results.append(result)
    completion, style = await with_model_and_style(served, completion)
    turns = served.client.turns
    body = await turns.run(answer(completion, results, style))
    headers = {"X-Request-Id": completion.id, "X-Stream-Url": completion.url}
    text = await turns.run(written(body))
    for result in results:
        await turns.run(free_logprobs(result))
    return Response(text, headers=headers, media_type="application/json")


def stream_of(
    gateway: Gateway,
    served: ServedQueue,
    completion: Completion,
    have: Sequence[Position] = (),
    *,
    is_new: bool = False,
) -> EventStream:
    """Returns the stream of a completion. The stream skips what its client has read: `have` has a
    position for each choice, or is empty if the client has read nothing. Raises InvalidRequestError
    for any other number of positions."""
    have = have or [Position()] * completion.num_choices
    if len(have) != completion.num_choices:
        raise wrong_field(
            "Last-Event-ID", f"has {len(have)} positions for {completion.num_choices} choices"
        )
    begin = partial(_Frames, served, completion, have)
    return EventStream(gateway, served, completion, begin, is_new=is_new)


class _Frames(Frames):
    """Server-sent events of a completion: the chunks of all choices, then the usage and the end."""

    def __init__(
        self, served: ServedQueue, completion: Completion, have: Sequence[Position], out: Out
    ) -> None:
        self._served = served
        self._completion = completion
        self._have = have
        self._out = out
        self._beginning = asyncio.Lock()
        self._writers: list[ChoiceWriter] = []
        self._positions: list[str] = []
        self._num_tokens = 0

    def write(self, place: int, event: TokenEvent) -> Unfinished:
        if event.finish_reason is not None:
            num_tokens = self._num_tokens + event.end
            names = self._completion.names
            if (error := failure(event.finish_reason, event.error, num_tokens, names)) is not None:
                raise error
        self._num_tokens += len(event.token_ids)
        if not self._writers:  # the model is known only when an event comes
            return partial(self._begin_and_write, place, event)
        if is_large(event):
            return partial(self._write_in_turns, place, event)
        return self._write_chunk(place, self._writers[place].chunk(event))

    async def finish(self) -> None:
        if self._completion.include_usage:
            usages = [writer.usage or Usage() for writer in self._writers]
            chunk = usage_chunk(self._completion, usages)
            await self._out.write_all(f"data: {chunk}\n\n".encode("ascii"))
        await self._out.write_all(_DONE)

    def error(self, error: ApiError) -> bytes:
        return f"data: {json.dumps(error.body)}\n\n".encode("ascii")

    async def _write_in_turns(self, place: int, event: TokenEvent) -> None:
        turns = self._served.client.turns
        chunk = await turns.run(self._writers[place].chunk_in_parts(event))
        await turns.run(free_logprobs(event))
        if (finish := self._write_chunk(place, chunk)) is not None:
            await finish()

    def _write_chunk(self, place: int, chunk: str | None) -> Unfinished:
        if chunk is None:
            return None
        self._positions[place] = self._writers[place].position
        last_id = event_id(self._completion.id, self._positions)
        return self._out.write(f"id: {last_id}\ndata: {chunk}\n\n".encode("ascii"))

    async def _begin_and_write(self, place: int, event: TokenEvent) -> None:
        async with self._beginning:
            if not self._writers:
                self._completion, style = await with_model_and_style(self._served, self._completion)
                self._writers = [
                    ChoiceWriter(self._completion, index, have, style)
                    for index, have in enumerate(self._have)
                ]
                self._positions = [writer.position for writer in self._writers]
                if roles := role_chunks(self._completion, self._have):
                    # These chunks have no ids, because a client that has read only them resumes
                    # from the beginning. They are sent together, before any other frame.
                    frames = "".join(f"data: {chunk}\n\n" for chunk in roles)
                    await self._out.write_all(frames.encode("ascii"))
        await self._write_in_turns(place, event)
