"""Reads a call's body, and enqueues its payloads in the queue that serves its model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from promptq.producer.calls.call_reader import Endpoint
from promptq.producer.calls.call_to_payloads import Prepared
from promptq.producer.calls.caller import Caller, check_model
from promptq.producer.calls.completion import (
    Completion,
    check_known_id,
    completion_of,
    failure,
)
from promptq.producer.calls.errors import ApiError
from promptq.producer.calls.queues import Found, ServedQueue
from promptq.producer.http.bodies import Hold, body_pieces
from promptq.producer.http.disconnects import cancelled_if_client_leaves
from promptq.producer.http.rate_limits import admit_call, take
from promptq.producer.http.state import Gateway
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.keys import Keys
from promptq.shared.runtime.logs import bind

Growing = Callable[[int], None]
History = Callable[[str, Caller, Growing], Awaitable[bytes]]


def with_headers(headers: Mapping[str, str], response: Response) -> Response:
    """Returns the answer with further headers."""
    response.headers.update(headers)
    return response


async def begin(
    gateway: Gateway, caller: Caller, prepared: Prepared, hold: Hold | None = None
) -> tuple[ServedQueue, Completion, Mapping[str, str]]:
    """Enqueues a call. Returns the queue, the completion, and headers that report the rate
    limits."""
    call = prepared.call
    served, view = await place_of(gateway, caller, prepared)
    enqueued, rates = await enqueue(gateway, served, caller, prepared, hold)
    # If the idempotency key was known, these are the ids of the first call with that key.
    completion_id = enqueued[0] if call.num_choices == 1 else enqueued[0].removesuffix(":0")
    check_known_id(completion_id, prepared.completion_id)
    bind(request_id=completion_id)
    return served, completion_of(call, completion_id, view.model), rates


async def place_of(gateway: Gateway, caller: Caller, prepared: Prepared) -> Found:
    """Returns the queue for a call, and its state. Raises ApiError, ModelNotServedError."""
    call = prepared.call
    if call.model:
        check_model(caller, call.model)
    key = prepared.new[0].request.idempotency_key
    known_as = None if key is None else partial(Keys.idempotency, key=key)
    served, view = await gateway.queues.of_model(call.model, known_as)
    check_model(caller, call.model or view.model)
    if not (view.has_worker or call.wait_for_worker):
        raise ApiError(
            503,
            "no worker is alive; without wait_for_worker: false the request would wait for one",
            code="no_worker",
            headers={"Retry-After": "5"},
        )
    return served, view


async def enqueue(
    gateway: Gateway,
    served: ServedQueue,
    caller: Caller,
    prepared: Prepared,
    hold: Hold | None = None,
) -> tuple[list[str], Mapping[str, str]]:
    """Enqueues a call. Returns the requests' ids, and headers that report the rate limits.

    Frees the payloads, and returns their bytes to the budget. Raises ApiError 429, and the errors
    of the client.
    """
    rates = await _take_rest(gateway, served, caller, prepared)
    served.watch.num_sent += len(prepared.new)
    request_ids = await served.client.enqueue_composed(prepared.new)
    prepared.new.clear()
    if hold is not None:
        hold.release()
    return request_ids, rates


async def _take_rest(
    gateway: Gateway, served: ServedQueue, caller: Caller, prepared: Prepared
) -> Mapping[str, str]:
    """Takes the call's cost, except the request that `admit_call` took. Raises ApiError 429."""
    rest = [
        replace(rate, amount=rate.amount - 1) if rate.name == "requests" else rate
        for rate in prepared.rates
    ]
    if all(rate.amount <= rate.limit for rate in prepared.rates):
        with suppress(ApiError):
            return await take(gateway, served, caller, rest, is_last_try=False)
    # The next attempt needs all of the cost, so the caller waits until all of it is available. The
    # request that `admit_call` took is not returned, because a body was read for it.
    return await take(gateway, served, caller, prepared.rates)


async def prompt_tokens(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    prepared: Prepared,
    hold: Hold | None = None,
) -> tuple[Result, int | None]:
    """Returns the tokens of the prompt, as a worker tokenised it, and the model's context length.

    Raises ApiError, PromptqError.
    """
    served, completion, _ = await begin(gateway, caller, prepared, hold)
    async with cancelled_if_client_leaves(gateway, request.receive, served, completion):
        result = await served.client.result(completion.id, check=False)
    error = failure(result.finish_reason, result.error, num_tokens=0, names=prepared.call.names)
    if error is not None:
        raise error
    if result.prompt_texts is None:  # another program wrote into the queue
        message = "the queue's record of this request has no tokens"
        raise ApiError(409, message, code="spoilt_record")
    return result, (await served.watch.look()).max_model_len


@asynccontextmanager
async def read_call(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    endpoint: Endpoint,
    *,
    check: Callable[[], Awaitable[object]] | None = None,
    history: History | None = None,
) -> AsyncIterator[tuple[Prepared, Hold]]:
    """Counts a call against the caller's rate, reads the call, and yields its payloads.

    Also yields the hold on the memory of the call's body, which ends with the `with` block. `check`
    runs before the body is read. `history` returns the items of the response that the call
    continues. It also calls its last argument with the number of their bytes.
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

        aliases = await gateway.queues.aliases()
        prepared = await gateway.call_reader.prepare(
            endpoint, body, request.headers, caller, aliases, history_of
        )
        hold.grow_to(prepared.num_bytes)
        yield prepared, hold
