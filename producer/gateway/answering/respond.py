"""From a call to its answer, for all endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from fastapi import Request
from starlette.responses import Response

from promptq.producer.clients.request_builder import compose
from promptq.producer.gateway.answering.completion_stream import CompletionStream, learned
from promptq.producer.gateway.answering.disconnects import while_present
from promptq.producer.gateway.answering.event_stream import EventStream
from promptq.producer.gateway.answering.stored_payloads import payloads_of
from promptq.producer.gateway.anthropic.field_names import NAMES as NAMES_OF_MESSAGES
from promptq.producer.gateway.context.access import (
    Caller,
    check_model,
    check_priority,
    check_tenant,
)
from promptq.producer.gateway.context.caller_rates import account_of, rates_of, take
from promptq.producer.gateway.context.gateway import Gateway
from promptq.producer.gateway.context.served_queues import Found, ServedQueue
from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import ApiError, ClientLeftError, named_as_asked
from promptq.producer.gateway.openai.answers import answer
from promptq.producer.gateway.openai.completion import (
    Completion,
    check_completion_id,
    completion_of,
)
from promptq.producer.gateway.openai.embeddings import as_asked
from promptq.producer.gateway.openai.endings import failure
from promptq.producer.gateway.openai.logprobs import freed
from promptq.producer.gateway.openai.read_positions import Position, read_event_id
from promptq.producer.gateway.openai.request_bodies import CompletionCall, request_ids
from promptq.producer.gateway.responses.field_names import NAMES as NAMES_OF_RESPONSES
from promptq.producer.gateway.responses.request_body import AskedResponse
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.keys import Keys
from promptq.shared.protocol.request import NewRequest
from promptq.shared.queue.scripts import Rate
from promptq.shared.runtime.large_json import written
from promptq.shared.runtime.logs import bind

_NAMES = {
    "response": NAMES_OF_RESPONSES,
    "input_count": NAMES_OF_RESPONSES,
    "message": NAMES_OF_MESSAGES,
    "count": NAMES_OF_MESSAGES,
}
"""What fields of a payload are called, by the form of a call."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that was read: the requests to enqueue, and what they take of the caller's rates.

    `call` holds only what its answer needs.
    """

    call: CompletionCall
    new: list[NewRequest]
    rates: list[Rate]
    completion_id: str
    asked: AskedResponse | None = None
    """Of a call of /v1/responses."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are held for the call until it is in the queue."""
        num_bytes = sum(len(item.payload or b"") for item in self.new)
        if self.asked is not None:
            num_bytes += len(self.asked.call.echo) + len(self.asked.input_lines)
        return num_bytes


def prepare(
    call: CompletionCall,
    caller: Caller,
    completion_id: str,
    aliases: Mapping[str, str],
    asked: AskedResponse | None = None,
) -> Prepared:
    """Compose a call's requests, as far as its caller may make them. Slow for a large body.

    `aliases` are names of models by the further names that programs use for them. Raises
    InvalidRequestError, ApiError 403.
    """
    call = granted(call.with_model_of(aliases), caller)
    tenant = call.fields.get("tenant") or ""
    if caller.is_own_tenant and tenant == caller.tenant:
        tenant = ""  # as in earlier releases, whose gateways may have taken the same call
    requests = call.with_key_of(caller.name, tenant).requests(completion_id)
    rates = rates_of(caller, requests)
    try:
        new = compose(requests, account_of(caller, caller.name))
    except InvalidRequestError as error:
        if names := _NAMES.get(call.form):
            message, field = named_as_asked(names, str(error), error.field)
            raise InvalidRequestError(message, field=field or "") from None
        raise as_asked(error) if call.form == "embeddings" else error from None
    return Prepared(call.for_answer(), new, rates, completion_id, asked=asked)


async def respond(
    request: Request, gateway: Gateway, caller: Caller, prepared: Prepared, hold: Hold
) -> Response:
    """Enqueue a call and answer it, or resume a stream that was interrupted.

    Releases the hold on the body once its requests are in the queue.
    """
    call = prepared.call
    last_event_id = request.headers.get("last-event-id")
    if last_event_id:
        if not call.stream:
            raise InvalidRequestError("Last-Event-ID: needs stream: true", field="Last-Event-ID")
        return await _resume(gateway, call, last_event_id)
    served, completion, rates = await begin(gateway, caller, prepared)
    prepared.new.clear()
    hold.release()
    if call.stream:
        stream = EventStream(gateway, served, CompletionStream(completion), is_new=True)
        return with_headers(rates, stream)
    try:
        async with while_present(request.receive):
            return with_headers(rates, await _whole_answer(gateway, served, completion))
    except ClientLeftError:
        if not completion.detach:
            gateway.cancels.cancel(served.client, completion.request_ids)
        raise


def with_headers(headers: Mapping[str, str], response: Response) -> Response:
    """The same answer with more headers."""
    response.headers.update(headers)
    return response


async def begin(
    gateway: Gateway, caller: Caller, prepared: Prepared
) -> tuple[ServedQueue, Completion, Mapping[str, str]]:
    """Enqueue a call. Gives where, its answer to be, and headers that report the caller's rates."""
    call = prepared.call
    served, view = await place_of(gateway, caller, prepared)
    enqueued, rates = await enqueue(gateway, served, caller, prepared)
    # If the idempotency key was known, these are the ids of the first call with that key.
    completion_id = enqueued[0] if call.num_choices == 1 else enqueued[0].removesuffix(":0")
    bind(request_id=completion_id)
    return served, completion_of(call, completion_id, view.model), rates


async def place_of(gateway: Gateway, caller: Caller, prepared: Prepared) -> Found:
    """The queue for a call. Raises ApiError, ModelNotServedError."""
    call = prepared.call
    if call.model:
        check_model(caller, call.model)
    served, view = await gateway.queues.of_model(call.model, _known_as(prepared.new[0]))
    check_model(caller, call.model or view.model)
    if not (view.has_worker or call.wait_for_worker):
        raise ApiError(
            503,
            "no worker is alive; without wait_for_worker: false the request would wait for one",
            code="no_worker",
            headers={"Retry-After": "5"},
        )
    return served, view


def _known_as(new: NewRequest) -> Callable[[Keys], str] | None:
    """The key in Redis of a request that is sent again."""
    key = new.request.idempotency_key
    return None if key is None else lambda keys: keys.idempotency(key)


async def enqueue(
    gateway: Gateway, served: ServedQueue, caller: Caller, prepared: Prepared
) -> tuple[list[str], Mapping[str, str]]:
    """Enqueue what was prepared. Gives the ids, and headers that report the caller's rates.

    Raises ApiError 429, and what the client raises.
    """
    rates = await _take_rest(gateway, served, caller, prepared)
    served.watch.num_sent += len(prepared.new)
    return await served.client.enqueue_composed(prepared.new), rates


async def _take_rest(
    gateway: Gateway, served: ServedQueue, caller: Caller, prepared: Prepared
) -> Mapping[str, str]:
    """Take what the call needs beyond `admit_call`. Raises ApiError 429."""
    rest = [
        replace(rate, amount=rate.amount - 1) if rate.name == "requests" else rate
        for rate in prepared.rates
    ]
    if all(rate.amount <= rate.limit for rate in prepared.rates):
        with suppress(ApiError):
            return await take(gateway, served, caller, rest, is_last_try=False)
    # The next attempt needs all of it, so the caller waits for all of it. What was taken before
    # stays taken, as a body was read for it.
    return await take(gateway, served, caller, prepared.rates)


def granted(call: CompletionCall, caller: Caller) -> CompletionCall:
    """The call with its caller's tenant and priority. Raises ApiError 403 for wrong ones."""
    tenant, priority = call.fields.get("tenant"), call.fields.get("priority")
    if tenant is not None:
        check_tenant(caller, tenant)
    elif caller.tenant is not None:
        call = call.with_fields(tenant=caller.tenant)
    if isinstance(priority, int):
        check_priority(caller, priority)
    elif priority is None and caller.highest_priority > 0:
        call = call.with_fields(priority=caller.highest_priority)
    return call


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
