"""Answers a call of /v1/responses: as one object, as a stream, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from redis.exceptions import RedisError
from starlette.responses import Response

from promptq.producer.apis.responses.ended_output import EndedOutput, Ending, ending_of
from promptq.producer.apis.responses.response_call import NewResponse, ResponseCall
from promptq.producer.apis.responses.response_records import ResponseRecords
from promptq.producer.apis.responses.stored_responses import StoredResponse
from promptq.producer.apis.responses.write import ResponseWriter, error_frame, finished_writer
from promptq.producer.calls.completion import check_known_id, model_and_style
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.http.connection_limits import Unfinished
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.state import Gateway
from promptq.producer.http.stream import EventStream, Frames, Out, frame_bytes
from promptq.producer.http.submit import IncomingCall, with_headers
from promptq.shared.errors import PromptqError, RequestNotFoundError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.urgency import tier_of
from promptq.shared.runtime.logs import bind

JSON = "application/json"
_LARGE_BYTES = 65_536
"""The last frames of a stream are collected, and sent when they exceed this number of bytes."""


async def respond(incoming: IncomingCall, records: ResponseRecords) -> Response:
    """Stores and enqueues a call, and returns the answer."""
    request, gateway, prepared = incoming.request, incoming.gateway, incoming.prepared
    answering, rates = await _begin(incoming, records)
    call = answering.call
    if prepared.call.stream:
        return with_headers(rates, stream_of(gateway, answering, is_new=not call.background))
    headers = {"X-Request-Id": call.id, **({"X-Stream-Url": call.url} if call.url else {})}
    if call.background and answering.stored is not None:
        is_new = call.id == prepared.completion_id
        whole = call.object("queued") if is_new else await records.current(answering.stored)
    else:
        async with cancelled_if_client_leaves(gateway, request.receive, answering.served, call):
            whole = await _whole(answering)
    return with_headers({**rates, **headers}, Response(whole, media_type=JSON))


@dataclass(frozen=True, slots=True)
class AnsweredResponse:
    """A response that has not ended. Its client waits for the events with numbers above `after`.

    `stored` is the response's record, or None without a record. With `at_once`, a stream begins
    before there is output, so an error is an event of the stream.
    """

    records: ResponseRecords
    served: ServedQueue
    call: ResponseCall
    stored: StoredResponse | None
    after: int = -1
    at_once: bool = False

    async def keep(self, output: EndedOutput) -> None:
        """Stores the output in the record. If this fails, `ResponseRecords` stores it later."""
        if self.stored is not None:
            with suppress(RedisError, PromptqError):
                await self.records.stored.end(self.stored, output)

    async def refuse(self, error: ApiError) -> None:
        """Deletes the record, and raises the error."""
        await _forget(self.records, self.stored)
        raise error


def stream_of(
    gateway: Gateway, answering: AnsweredResponse, *, is_new: bool = False
) -> EventStream:
    """Returns the stream of a response that has not ended."""
    begin = partial(_Frames, answering)
    return EventStream(gateway, answering.served, answering.call, begin, is_new=is_new)


class _Frames(Frames):
    def __init__(self, answering: AnsweredResponse, out: Out) -> None:
        self._answering = answering
        self._out = out
        self._writer = ResponseWriter(answering.call, answering.after)
        self._is_open = False
        self._knows_model = False
        self._events: list[TokenEvent] = []

    async def begin(self) -> None:
        if self._answering.at_once:
            await self._out.write_all(self._opening())

    def write(self, place: int, event: TokenEvent) -> Unfinished:
        error = self._writer.failure_of(ending_of(event)) if event.is_last else None
        if error is not None and not self._out.has_begun:
            return partial(self._answering.refuse, error)
        self._events.append(event)
        if not self._knows_model:
            return partial(self._begin_and_write, event)
        return self._write(event)

    async def finish(self) -> None:
        output = EndedOutput.of(self._events, *await model_and_style(self._answering.served))
        await self._answering.keep(output)

    def error(self, error: ApiError) -> bytes:
        return frame_bytes(error_frame(error, self._writer.next_number))

    def _opening(self) -> bytes:
        if self._is_open:
            return b""
        self._is_open = True
        return frame_bytes(self._writer.opening())

    def _write(self, event: TokenEvent) -> Unfinished:
        frames = self._opening() + frame_bytes(self._writer.write(event.text, event.logprobs))
        if event.is_last:
            return partial(self._write_end, frames, ending_of(event))
        return self._out.write(frames) if frames else None

    async def _write_end(self, frames: bytes, ending: Ending) -> None:
        for part in map(frame_bytes, self._writer.end(ending)):
            frames += part
            if len(frames) > _LARGE_BYTES:
                await self._out.write_all(frames)
                await self._answering.served.client.turns.give_way()
                frames = b""
        if frames:  # an empty part would end the body
            await self._out.write_all(frames)

    async def _begin_and_write(self, event: TokenEvent) -> None:
        self._knows_model = True
        self._writer.set_model(*await model_and_style(self._answering.served))
        if (finish := self._write(event)) is not None:
            await finish()


async def _whole(answering: AnsweredResponse) -> str:
    events: list[TokenEvent] = []
    await answering.served.client.follow(answering.call.id, events.append)
    output = EndedOutput.of(events, *await model_and_style(answering.served))
    writer = await answering.served.client.turns.run(finished_writer(answering.call, output))
    if (error := writer.failure_of(output.ending)) is not None:
        await answering.refuse(error)
    await answering.keep(output)
    return writer.whole


async def _begin(
    incoming: IncomingCall, records: ResponseRecords
) -> tuple[AnsweredResponse, Mapping[str, str]]:
    """Returns the enqueued response, and headers with the state of the caller's rate limits."""
    prepared, new = incoming.prepared, incoming.prepared.extra
    assert isinstance(new, NewResponse)
    served, view = await incoming.queue()
    echo = f'{new.call.echo},"service_tier":"{tier_of(prepared.call.priority)}"'
    call = replace(new.call, model=prepared.call.model or view.model, echo=echo)
    bind(request_id=call.id)
    tenant = prepared.new[0].request.tenant or ""
    stored = StoredResponse(call, tenant, served.name) if call.store else None
    if stored is not None:
        await records.stored.add(replace(new, call=call), tenant, served.name)
    try:
        [enqueued], rates = await incoming.enqueue(served)
        if enqueued != call.id:  # an earlier call had the same idempotency key
            check_known_id(enqueued, call.id)
            bind(request_id=enqueued)
            call = replace(call, id=enqueued)
            await _forget(records, stored)
            if stored is not None:
                try:
                    stored = await records.stored.get(call.id)
                    call = stored.call
                except RequestNotFoundError:
                    stored = None
    except BaseException:
        await asyncio.shield(_forget(records, stored))
        raise
    answering = AnsweredResponse(records, served, call, stored, at_once=call.background)
    return answering, rates


async def _forget(records: ResponseRecords, stored: StoredResponse | None) -> None:
    # If Redis is unreachable, the record stays until it expires.
    if stored is not None:
        with suppress(RedisError, PromptqError):
            await records.stored.forget(stored.call.id, stored.tenant)
