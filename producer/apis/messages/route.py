"""Answers calls of /v1/messages."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from promptq.producer.apis.messages.read import NAMES, CountOptions, MessageOptions
from promptq.producer.apis.messages.write import PING, MessageWriter, error_frame
from promptq.producer.calls.completion import Completion, with_model_and_style
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.connection_limits import Unfinished
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.errors import MessagesErrorAnswer, described
from promptq.producer.http.openapi import TOOL_FIELDS, operation
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.producer.http.stream import EventStream, Frames, Out, frame_bytes
from promptq.producer.http.submit import IncomingCall, read_call, with_headers
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.runtime.turns import Work

_HIDDEN = TOOL_FIELDS | {*NAMES, "logprobs", "prompt_logprobs"}

router = APIRouter(
    tags=["messages"],
    responses=described(
        400, 401, 403, 404, 408, 409, 413, 429, 500, 503, model=MessagesErrorAnswer
    ),
    dependencies=[needs("completions")],
)


MESSAGE = operation(MessageOptions, hidden=_HIDDEN)


@router.post("/v1/messages", openapi_extra=MESSAGE, response_class=Response)
async def create_message(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """Answer a conversation: as one object, or with `stream`, piece by piece."""
    async with read_call(request, gateway, caller, "messages") as incoming:
        return await respond(incoming)


async def respond(incoming: IncomingCall) -> Response:
    """Enqueues a call and returns the answer."""
    request, gateway = incoming.request, incoming.gateway
    served, completion, rates = await incoming.begin()
    headers = {**rates, "Request-Id": completion.id}
    if incoming.prepared.call.stream:
        return with_headers(headers, message_stream(gateway, served, completion, is_new=True))
    headers |= {"X-Request-Id": completion.id, "X-Stream-Url": completion.url}
    async with cancelled_if_client_leaves(gateway, request.receive, served, completion):
        whole = await _whole(served, completion)
    return with_headers(headers, Response(whole, media_type="application/json"))


@router.post("/v1/messages/count_tokens", openapi_extra=operation(CountOptions, hidden=_HIDDEN))
async def count_tokens(
    request: Request, gateway: ThisGateway, caller: ThisCaller
) -> dict[str, int]:
    """Count the tokens of a conversation. A worker does this when the call's turn comes."""
    async with read_call(request, gateway, caller, "counts") as incoming:
        result, _ = await incoming.prompt_tokens()
    return {"input_tokens": result.usage.prompt_tokens}


def message_stream(
    gateway: Gateway, served: ServedQueue, completion: Completion, *, is_new: bool = False
) -> EventStream:
    """Returns the stream of a message, from its beginning."""
    begin = partial(_Frames, served, completion)
    return EventStream(gateway, served, completion, begin, is_new=is_new)


class _Frames(Frames):
    def __init__(self, served: ServedQueue, completion: Completion, out: Out) -> None:
        self._served = served
        self._completion = completion
        self._out = out
        self._writer: MessageWriter | None = None

    def write(self, place: int, event: TokenEvent) -> Unfinished:
        if self._writer is None:  # the model is known only when an event comes
            return partial(self._begin_and_write, place, event)
        frames = self._writer.write(event)
        return self._out.write(frame_bytes(frames)) if frames else None

    def error(self, error: ApiError) -> bytes:
        return error_frame(error)

    async def _begin_and_write(self, place: int, event: TokenEvent) -> None:
        self._writer = MessageWriter(*await with_model_and_style(self._served, self._completion))
        self._out.keepalive = PING  # no event may come before the first frame of a message
        if (finish := self.write(place, event)) is not None:
            await finish()


async def _whole(served: ServedQueue, completion: Completion) -> str:
    events: list[TokenEvent] = []
    await served.client.follow(completion.id, events.append)
    writer = MessageWriter(*await with_model_and_style(served, completion))

    def writing() -> Work[None]:
        for event in events:
            writer.write(event)
            yield

    await served.client.turns.run(writing())
    return writer.whole
