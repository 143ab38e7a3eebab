"""Reads the state of stored responses, and stores their output after they have ended.

The queue keeps a result for an hour by default. The first read of an ended response stores the
output in the response's record. If nobody reads a response, a background task of a gateway stores
the output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from promptq.producer.apis.responses.ended_output import EndedOutput
from promptq.producer.apis.responses.response_call import Status, not_known
from promptq.producer.apis.responses.stored_responses import StoredResponse, StoredResponses
from promptq.producer.apis.responses.write import finished_writer
from promptq.producer.calls.call_body import wrong_field
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.completion import model_and_style
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.clients.connecting import explained
from promptq.producer.http.state import Gateway
from promptq.shared.errors import RedisSideError, RequestNotFoundError, SpoiltRecordError
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES, RequestState
from promptq.shared.queue.call import Call
from promptq.shared.queue.lookups import state_of
from promptq.shared.queue.spoilt import UNREADABLE, errors_logged, note, spoilt_record
from promptq.shared.runtime.logs import get_logger

_LOOK_SECONDS = 5.0
"""Seconds between two searches for responses whose output is not stored."""
_NOT_SINCE_MS = 10_000  # between two checks of one response
_PAGE = 200
MOST_LINKS = 500
"""The most responses in one conversation. Each call reads all of them, one after the other."""
_BEGIN_SECONDS = 60.0
"""The most seconds between storing a response and enqueueing its request."""


class ResponseRecords:
    """The stored responses of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        settings = gateway.settings
        self.stored = StoredResponses(
            gateway.queue,
            gateway.client.turns,
            seconds=settings.responses_seconds,
            most=settings.responses_per_tenant,
            most_bytes=settings.responses_bytes_per_tenant,
        )
        self._gateway = gateway

    async def get(self, response_id: str, caller: Caller) -> StoredResponse:
        """Returns a record. Raises RequestNotFoundError if the caller has no such record."""
        tenants = None if caller.is_admin else (caller.tenant or "",)
        return await self.stored.get(response_id, tenants)

    async def served(self, stored: StoredResponse) -> ServedQueue:
        """Returns the queue of a response's request. Raises ApiError 503 for an unreadable
        queue."""
        for served in [*await self._gateway.queues.all(), *self._gateway.queues.opened]:
            if served.name == stored.queue:
                return served
        raise ApiError(
            503,
            "this gateway cannot read the response's queue at the moment",
            code="queue_unavailable",
            headers={"Retry-After": "5"},
        )

    async def output(self, stored: StoredResponse) -> EndedOutput | None:
        """Returns a response's output, and stores the output in the record; None if the response
        has not ended. Raises RequestNotFoundError for an unreadable record, ApiError 503 for an
        unreadable queue."""
        if stored.result is not None:
            try:
                return await self.stored.turns.run(EndedOutput.parse(stored.result))
            except UNREADABLE as error:  # any program may have written the record
                note(spoilt_record(f"response {stored.call.id!r}", error))
                raise not_known(stored.call.id) from None
        served, response_id = await self.served(stored), stored.call.id
        state, _ = await self._state(served, response_id)
        if state is None and time.time() - stored.call.created < _BEGIN_SECONDS:
            return None
        if state is not None and not state.is_final:
            return None
        events: list[TokenEvent] = []
        output = EndedOutput.failed(
            "not_kept", "the output expired in the queue before a gateway could store it"
        )
        if state is not None:
            try:
                await served.client.follow(response_id, events.append)
                output = EndedOutput.of(events, *await model_and_style(served))
            except RequestNotFoundError:
                pass
            except SpoiltRecordError as error:
                note(error)
                output = EndedOutput.failed("spoilt_record", str(error))
        await self.stored.end(stored, output)
        return output

    async def cancel(self, stored: StoredResponse) -> None:
        """Cancels a response, unless it has ended."""
        if await self.output(stored) is None:
            await (await self.served(stored)).client.cancel(stored.call.id)

    async def current(self, stored: StoredResponse) -> str:
        """Returns a response in its present state, as JSON."""
        output = await self.output(stored)
        if output is not None:
            return (await self.stored.turns.run(finished_writer(stored.call, output))).whole
        state, is_cancelled = await self._state(await self.served(stored), stored.call.id)
        status: Status = "in_progress"
        if is_cancelled:  # the worker will end the request
            status = "cancelled"
        elif state is not RequestState.ACTIVE and stored.call.background:
            status = "queued"
        return stored.call.object(status)

    async def history(
        self, response_id: str, caller: Caller, on_size: Callable[[int], object]
    ) -> bytes:
        """Returns the items of a response and of all responses before it, as lines of JSON.

        After each response, calls `on_size` with the number of bytes so far. Raises ApiError 400 if
        a response is unknown or has not ended, or if there are more than MOST_LINKS responses.
        Raises InvalidRequestError if the items have more bytes than a payload may have.
        """
        turns: list[bytes] = []
        num_bytes, previous = 0, response_id
        seen = set[str]()
        while previous and previous not in seen:  # forged records may form a circle
            if len(seen) == MOST_LINKS:
                raise _no_history(
                    f"the conversation has more than the {MOST_LINKS} responses that may be"
                    " continued; send it as input, or begin a new one",
                    "conversation_too_long",
                )
            seen.add(previous)
            try:
                stored = await self.get(previous, caller)
            except RequestNotFoundError as error:
                raise _no_history(str(error), "previous_response_not_found") from None
            output = await self.output(stored)
            if output is None:
                raise _no_history(
                    f"the response {previous!r} has not ended", "previous_response_not_over"
                )
            lines = await self.stored.input_lines(stored)
            writer = await self.stored.turns.run(finished_writer(stored.call, output))
            lines += [item.encode() for item in writer.items]
            turns.append(b"\n".join(lines))
            num_bytes += len(turns[-1]) + 1
            if num_bytes > MAX_PAYLOAD_BYTES:
                raise wrong_field(
                    "previous_response_id",
                    f"the conversation has more than the {MAX_PAYLOAD_BYTES} bytes allowed",
                )
            on_size(num_bytes)
            previous = stored.call.previous_response_id or ""
        return b"\n".join(reversed(turns))

    async def _state(
        self, served: ServedQueue, response_id: str
    ) -> tuple[RequestState | None, bool]:
        """Returns a request's state (None if unknown), and whether a client has cancelled it."""
        key = served.queue.keys.request(response_id)
        fields = ["HMGET", key, "state", "cancelled"]
        reading: Call[list[bytes | None]] = Call("", fields, list, lambda: [None] * 2)
        with explained(served.client.url):
            state, cancelled = await served.queue.run(reading)
        return (None, False) if state is None else (state_of(state), cancelled is not None)

    async def keep_all(self) -> None:
        """Stores the output of responses that nobody reads. Runs until it is cancelled."""
        while True:
            due: list[StoredResponse] = []
            try:
                due = await self.stored.unfinished(_NOT_SINCE_MS, _PAGE)
                for stored in due:
                    # ApiError: this gateway does not serve the response's queue, but another may.
                    with errors_logged(f"response {stored.call.id}"), suppress(ApiError):
                        await self.output(stored)
            except (RedisError, RedisSideError) as error:
                get_logger().debug("the stored responses cannot be checked", error=str(error))
            if len(due) < _PAGE:
                await asyncio.sleep(_LOOK_SECONDS)


def _no_history(message: str, code: str) -> ApiError:
    return ApiError(
        400, f"previous_response_id: {message}", param="previous_response_id", code=code
    )
