"""Reads, cancels and forks completions by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from promptq.producer.apis.completions import route as completions
from promptq.producer.apis.completions.positions import read_event_id
from promptq.producer.apis.messages import route as messages
from promptq.producer.calls.call_body import HEADERS, read_object, without_none, wrong_field
from promptq.producer.calls.call_reader import Endpoint
from promptq.producer.calls.call_to_payloads import payloads_of
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.completion import (
    Completion,
    all_request_ids,
    check_completion_id,
    is_message_id,
    needed_request_ids,
    stream_completion,
    wants_echo,
)
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.clients.forks import ForkSource, check_changes, fork_source
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.bodies import read_body
from promptq.producer.http.errors import described
from promptq.producer.http.rate_limits import COUNTED_READ, admit_call
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.producer.http.stream import place_of
from promptq.producer.http.submit import IncomingCall
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.request import ForkPoint, invalid_request
from promptq.shared.queue import scripts
from promptq.shared.queue.call import carry_out_async
from promptq.shared.runtime.logs import bind

_MOST_BYTES = 65_536  # of a fork's body; reading them takes a few milliseconds at worst

router = APIRouter(
    tags=["streams"],
    responses=described(400, 401, 403, 404, 503),
    dependencies=[needs("completions")],
)

_BY_WEIGHT = (CancelStatus.FLAGGED, CancelStatus.CANCELLED)
"""Statuses of a cancelled completion, in the order of precedence. The completion gets the first
status that any of its requests has. If no request has such a status, it gets `finished`."""


class ForkOptions(BaseModel):
    """The body of a call that forks a completion, the source. Any further field (see `changes`)
    replaces the field of this name in the source's call."""

    model_config = ConfigDict(extra="allow", strict=True)

    at: int | None = Field(
        None, ge=0, description="continue after this number of tokens; left out: after all of them"
    )
    append: str = Field("", description="add this text after these tokens")
    choice: int | None = Field(
        None, ge=0, description="index of the answer to continue, if the call has several"
    )

    @property
    def changes(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def read_fork(body: bytes) -> ForkOptions:
    """Reads the body of a fork. Raises InvalidRequestError that names the wrong field."""
    try:
        options = ForkOptions.model_validate(without_none(read_object(body or b"{}")))
    except ValidationError as error:
        raise invalid_request(error) from None
    check_changes(options.changes)
    return options


def fork_call(
    source: ForkSource,
    options: ForkOptions,
    headers: Mapping[str, str],
    caller: Caller,
    model: str,
) -> tuple[Endpoint, bytes, ForkPoint]:
    """Returns the endpoint and the body of the call that creates a fork, and the fork point.

    The body has the source's fields, with the changes of the options and headers. `model` is the
    model of the source's queue. Raises InvalidRequestError.
    """
    fields, point = source.fork(options.at, options.append)
    changes = options.changes
    is_chat = fields.get("messages") is not None
    if model:
        fields.setdefault("model", model)
    tenant = source.tenant or fields.pop("tenant", None)
    if tenant and (tenant == caller.tenant or caller.is_free):
        fields["tenant"] = tenant
    else:
        fields.pop("tenant", None)  # an administrator's fork has the administrator's tenant
    for name in (name for name, header in HEADERS.items() if header in headers):
        fields.pop(name, None)
    num_top = fields.get("logprobs")
    if is_chat and num_top is not None:  # a chat has two fields for this field of a payload
        fields["logprobs"] = True
        if "logprobs" not in changes:
            fields["top_logprobs"] = num_top
    if is_message_id(source.request_id):
        if "stop_sequences" in changes:
            changes["stop"] = changes.pop("stop_sequences")
        return "message_forks", to_json({**fields, **changes}), point
    return "chats" if is_chat else "completions", to_json({**fields, **changes}), point


@router.get("/v1/streams/{completion_id}", response_class=Response, **COUNTED_READ)
async def read_stream(
    completion_id: str,
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Read the stream of a completion, from its beginning or after the event `Last-Event-ID`.

    The original call's answer has this address, with the query, in its header `X-Stream-Url`.
    """
    served, completion = await _find(gateway, caller, completion_id, request)
    if is_message_id(completion_id):  # its events have no ids, so the stream begins anew
        return messages.message_stream(gateway, served, completion)
    if not last_event_id:
        return completions.stream_of(gateway, served, completion)
    of_completion, have = read_event_id(last_event_id)
    if of_completion != completion_id:
        raise wrong_field("Last-Event-ID", "belongs to another stream")
    return completions.stream_of(gateway, served, completion, have)


@router.get("/v1/streams/{completion_id}/place", **COUNTED_READ)
async def read_place(
    completion_id: str, request: Request, gateway: ThisGateway, caller: ThisCaller
) -> dict[str, object]:
    """Read where a completion waits: how many requests wait in front, and when it will start.

    Of several answers, this is the place of the first. Unless the completion waits, all numbers are
    null, and `because` says why.
    """
    first, *_ = all_request_ids(completion_id, request.query_params)
    bind(request_id=completion_id)
    served, _ = await payloads_of(gateway.queues, caller, [first])
    return place_of(completion_id, await served.client.place(first))


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
    completion_id: str, request: Request, gateway: ThisGateway, caller: ThisCaller
) -> Response:
    """Begin a new completion, the fork, with the first tokens of another completion, the source.

    The source may still run. The fork's output begins with the source's first `at` tokens and the
    text `append`. The header `X-Forked-From` has the number of these tokens and the source's id.
    """
    if request.headers.get("last-event-id"):
        raise wrong_field("Last-Event-ID", "to resume a fork, read the address of its stream")
    await admit_call(gateway, caller)
    with gateway.bodies.hold(caller.party) as hold:
        options = read_fork(await read_body(request, _MOST_BYTES, hold))
        check_completion_id(completion_id)
        choice = "" if options.choice is None else f":{options.choice}"
        request_id = f"{completion_id}{choice}"
        served, _ = await payloads_of(gateway.queues, caller, [request_id])
        source = await carry_out_async(fork_source(served.queue.keys, request_id), served.queue.run)
        model = (await served.view()).model
        endpoint, body, point = fork_call(source, options, request.headers, caller, model)
        hold.grow_to(len(body))
        aliases = await gateway.queues.aliases()
        prepared = await gateway.call_reader.prepare(
            endpoint, [body], request.headers, caller, aliases
        )
        new = [replace(each, forked_from=point) for each in prepared.new]
        prepared = replace(prepared, new=new)
        respond = messages.respond if is_message_id(completion_id) else completions.respond
        response = await respond(IncomingCall(request, gateway, caller, prepared, hold))
    response.headers["X-Forked-From"] = str(point)
    return response


@router.delete("/v1/streams/{completion_id}")
async def cancel_stream(
    completion_id: str, request: Request, gateway: ThisGateway, caller: ThisCaller
) -> dict[str, object]:
    """Cancel a completion, for example one that continues without its client.

    `status` is `cancelled`, `flagged` (its workers will end it) or `finished` (it had ended).
    """
    ids = all_request_ids(completion_id, request.query_params)
    bind(request_id=completion_id)
    served, _ = await payloads_of(gateway.queues, caller, ids[:1])
    statuses = await served.queue.run(scripts.cancel(ids))
    status = next((one for one in _BY_WEIGHT if one in statuses), CancelStatus.FINISHED)
    is_cancelled = status is not CancelStatus.FINISHED
    return {"id": completion_id, "object": "stream", "cancelled": is_cancelled, "status": status}


async def _find(
    gateway: Gateway, caller: Caller, completion_id: str, request: Request
) -> tuple[ServedQueue, Completion]:
    """Returns the caller's completion and its queue. Raises RequestNotFoundError."""
    query = request.query_params
    request_ids = needed_request_ids(completion_id, query)
    bind(request_id=completion_id)
    served, payloads = await payloads_of(gateway.queues, caller, request_ids)
    shown = await gateway.call_reader.shown_fields(caller, payloads, wants_echo(query))
    view = await served.view()
    return served, stream_completion(completion_id, query, shown, view.model)
