"""Reads calls, and enqueues their payloads in the queues that serve their models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from promptq.producer.calls.call_reader import Endpoint
from promptq.producer.calls.call_to_payloads import Prepared, check_pictures_served
from promptq.producer.calls.caller import Caller, check_model
from promptq.producer.calls.completion import Completion, check_known_id, completion_of, failure
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import Found, ServedQueue
from promptq.producer.http.bodies import Hold, body_pieces
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.rate_limits import admit_call, take
from promptq.producer.http.state import Gateway
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime.logs import bind

History = Callable[[str, Caller, Callable[[int], None]], Awaitable[bytes]]
"""A function that returns the items of a response and of all responses before it. Arguments: the
response's id, the caller as its owner, and a function to call with the number of bytes so far."""


def with_headers(headers: Mapping[str, str], response: Response) -> Response:
    """Adds headers to an answer, and returns the answer."""
    response.headers.update(headers)
    return response


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A call that was read: its HTTP request, its gateway, its caller and its payloads.

    `hold` is the call's part of the budget for bodies; None if the call has no part.
    """

    request: Request
    gateway: Gateway
    caller: Caller
    prepared: Prepared
    hold: Hold | None = None

    async def begin(self) -> tuple[ServedQueue, Completion, Mapping[str, str]]:
        """Enqueues the call. Returns its queue, its completion, and headers that report rates."""
        call = self.prepared.call
        served, view = await self.queue()
        enqueued, rates = await self.enqueue(served)
        # If an earlier call had the same idempotency key, these are the ids of that call.
        completion_id = enqueued[0] if call.num_choices == 1 else enqueued[0].removesuffix(":0")
        check_known_id(completion_id, self.prepared.completion_id)
        bind(request_id=completion_id)
        return served, completion_of(call, completion_id, view.model), rates

    async def queue(self) -> Found:
        """Returns the queue for the call, with its state. Raises ApiError, ModelNotServedError."""
        call = self.prepared.call
        if call.model:
            check_model(self.caller, call.model)
        key = self.prepared.new[0].request.idempotency_key
        known_as = None if key is None else partial(Keys.idempotency, key=key)
        served, view = await self.gateway.queues.of_model(call.model, known_as)
        check_model(self.caller, call.model or view.model)
        if call.has_pictures and "pictures" in view.refused:  # a worker may have come since
            check_pictures_served(await served.view(now=True), call.names)
        if not (view.has_worker or call.wait_for_worker):
            raise ApiError(
                503,
                "no worker is alive; without wait_for_worker: false the request would wait for one",
                code="no_worker",
                headers={"Retry-After": "5"},
            )
        return served, view

    async def enqueue(self, served: ServedQueue) -> tuple[list[str], Mapping[str, str]]:
        """Charges the call to its caller's rates and enqueues it. Returns the requests' ids, and
        headers that report the rates.

        Frees the payloads, and returns their bytes to the budget for bodies. Raises ApiError 429,
        and the errors of the client.
        """
        rates = await self._take_rest(served)
        served.num_sent += len(self.prepared.new)
        request_ids = await served.client.enqueue_composed(
            served.with_guesses(self.prepared.new, self.prepared.features)
        )
        self.prepared.new.clear()
        if self.hold is not None:
            self.hold.release()
        return request_ids, rates

    async def _take_rest(self, served: ServedQueue) -> Mapping[str, str]:
        """Takes the call's cost from the rates. `admit_call` has already taken one request. Raises
        ApiError 429."""
        rates = self.prepared.rates
        rest = [
            replace(rate, amount=rate.amount - 1) if rate.name == "requests" else rate
            for rate in rates
        ]
        if all(rate.amount <= rate.limit for rate in rates):
            with suppress(ApiError):
                return await take(self.gateway, served, self.caller, rest, is_last_try=False)
        # The caller must wait until the whole cost is available, because its next attempt takes all
        # of it. The request that `admit_call` took is not returned: a body was read for it.
        return await take(self.gateway, served, self.caller, rates)

    async def prompt_tokens(self) -> tuple[Result, int | None]:
        """Enqueues a call that only tokenises its prompt. Returns the result, which has the tokens,
        and the model's context length (None if unknown). Raises ApiError, PromptqError."""
        served, completion, _ = await self.begin()
        async with cancelled_if_client_leaves(
            self.gateway, self.request.receive, served, completion
        ):
            result = await served.client.result(completion.id, check=False)
        names = self.prepared.call.names
        error = failure(result.finish_reason, result.error, num_tokens=0, names=names)
        if error is not None:
            raise error
        if result.prompt_texts is None:  # another program wrote into the queue
            message = "the queue's record of this request has no tokens"
            raise ApiError(409, message, code="spoilt_record")
        return result, (await served.view()).max_model_len


@asynccontextmanager
async def read_call(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    endpoint: Endpoint,
    history: History | None = None,
    *,
    check: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[IncomingCall]:
    """Context manager that charges one request to the caller's rate, reads the call, and yields it.

    Until the block ends, the body counts as memory that bodies use. `check` runs before the body is
    read. `history` is needed for calls that may continue a response.
    """
    await admit_call(gateway, caller)
    if check is not None:
        await check()
    with gateway.bodies.hold(caller.party) as hold:
        most = gateway.settings.http_max_body_bytes
        body = [piece async for piece in body_pieces(request, most, hold)]
        num_bytes = sum(map(len, body))

        async def history_of(response_id: str) -> bytes:
            assert history is not None
            return await history(response_id, caller, lambda size: hold.grow_to(num_bytes + size))

        async def fetch(urls: Sequence[str], field: str) -> Mapping[str, str]:
            found = await gateway.pictures.fetch(urls, field, caller)
            hold.grow_to(num_bytes + sum(map(len, found.values())))
            return found

        aliases = await gateway.queues.aliases()
        prepared = await gateway.call_reader.prepare(
            endpoint, body, request.headers, caller, aliases, fetch, history_of
        )
        hold.grow_to(prepared.num_bytes)
        yield IncomingCall(request, gateway, caller, prepared, hold)
