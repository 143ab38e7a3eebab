"""From a call of /v1/messages to its answer, whole or as a stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fastapi import Request
from starlette.responses import Response

from promptq.producer.gateway.answering.completion_stream import StreamedCompletion, learned
from promptq.producer.gateway.answering.disconnects import while_present
from promptq.producer.gateway.answering.event_stream import EventStream, Out, sent
from promptq.producer.gateway.answering.respond import Prepared, begin, with_headers
from promptq.producer.gateway.anthropic.message_writer import PING, MessageWriter, error_frame
from promptq.producer.gateway.context.access import Caller
from promptq.producer.gateway.context.gateway import Gateway
from promptq.producer.gateway.context.served_queues import ServedQueue
from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.connection_limits import Unfinished
from promptq.producer.gateway.http.errors import ApiError, ClientLeftError
from promptq.producer.gateway.openai.completion import Completion
from promptq.shared.protocol.events import TokenEvent


async def respond_message(
    request: Request, gateway: Gateway, caller: Caller, prepared: Prepared, hold: Hold
) -> Response:
    """Enqueue a call and answer it. Releases the hold on the body once it is in the queue."""
    served, completion, rates = await begin(gateway, caller, prepared)
    prepared.new.clear()
    hold.release()
    headers = {**rates, "Request-Id": completion.id}
    if prepared.call.stream:
        stream = EventStream(gateway, served, MessageStream(completion), is_new=True)
        return with_headers(headers, stream)
    headers |= {"X-Request-Id": completion.id, "X-Stream-Url": completion.url}
    try:
        async with while_present(request.receive):
            whole = await _whole(served, completion)
    except ClientLeftError:
        if not completion.detach:
            gateway.cancels.cancel(served.client, completion.request_ids)
        raise
    return with_headers(headers, Response(whole, media_type="application/json"))


@dataclass(frozen=True, slots=True)
class MessageStream(StreamedCompletion):
    """A message for `EventStream`, from its beginning."""

    def frames(self, served: ServedQueue, out: Out) -> MessageFrames:
        return MessageFrames(served, self.completion, out)


class MessageFrames:
    """The frames of a message."""

    def __init__(self, served: ServedQueue, completion: Completion, out: Out) -> None:
        self._served = served
        self._completion = completion
        self._out = out
        self._writer: MessageWriter | None = None

    async def begin(self) -> None:
        """Nothing comes before the first event."""

    def write(self, place: int, event: TokenEvent) -> Unfinished:
        if self._writer is None:
            return partial(self._learn_and_write, event)
        return self._write(self._writer, event)

    async def finish(self) -> None:
        """The frames of the last event end the message."""

    def error(self, error: ApiError) -> bytes:
        return error_frame(error)

    def _write(self, writer: MessageWriter, event: TokenEvent) -> Unfinished:
        frames = writer.write(event)
        return self._out.write(sent(frames)) if frames else None

    async def _learn_and_write(self, event: TokenEvent) -> None:
        self._writer = await _writer_of(self._served, self._completion)
        self._out.keepalive = PING  # nothing but a comment may come before the first event
        if (finish := self._write(self._writer, event)) is not None:
            await finish()


async def _whole(served: ServedQueue, completion: Completion) -> str:
    """The message, once it is over. Raises ApiError if there is no answer."""
    events: list[TokenEvent] = []
    await served.client.follow(completion.id, events.append)
    writer = await _writer_of(served, completion)
    for event in events:
        writer.write(event)
    return writer.whole


async def _writer_of(served: ServedQueue, completion: Completion) -> MessageWriter:
    return MessageWriter(*await learned(served, completion))
