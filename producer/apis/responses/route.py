"""Routes of /v1/responses: create, continue, read, cancel and delete responses."""

from __future__ import annotations

from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from promptq.producer.apis.responses.input_items import id_of
from promptq.producer.apis.responses.read import NAMES, InputOptions, ResponseOptions
from promptq.producer.apis.responses.respond import JSON, AnsweredResponse, respond, stream_of
from promptq.producer.apis.responses.response_call import is_response_id
from promptq.producer.apis.responses.response_records import ResponseRecords
from promptq.producer.apis.responses.write import ResponseWriter, frames_of
from promptq.producer.calls.call_body import wrong_field
from promptq.producer.calls.errors import ApiError
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.errors import described, method_not_allowed
from promptq.producer.http.openapi import TOOL_FIELDS, operation
from promptq.producer.http.rate_limits import COUNTED_READ, count_read
from promptq.producer.http.state import ThisGateway
from promptq.producer.http.stream import FramesInTurns
from promptq.producer.http.submit import read_call
from promptq.shared.runtime.logs import bind

_HIDDEN = TOOL_FIELDS | {*NAMES, "prompt_logprobs"}

router = APIRouter(
    tags=["responses"],
    responses=described(400, 401, 403, 404, 503),
    dependencies=[needs("completions")],
)

_MAX_LIST = 100
_MAX_NUMBER = 2**53


def records_of(gateway: ThisGateway) -> ResponseRecords:
    """Returns the stored responses of the gateway."""
    return ResponseRecords(gateway)


TheseRecords = Annotated[ResponseRecords, Depends(records_of)]

RESPONSE = operation(ResponseOptions, hidden=_HIDDEN)


@router.post(
    "/v1/responses",
    openapi_extra=RESPONSE,
    response_class=Response,
    responses=described(408, 409, 413, 429, 500),
)
async def create_response(
    request: Request, gateway: ThisGateway, caller: ThisCaller, records: TheseRecords
) -> Response:
    """Answer a conversation: as one object, with `stream` piece by piece, or in the background."""
    async with read_call(request, gateway, caller, "responses", records.history) as incoming:
        return await respond(incoming, records)


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=operation(InputOptions, hidden=_HIDDEN),
    responses=described(408, 409, 413, 429, 500),
)
async def count_input_tokens(
    request: Request, gateway: ThisGateway, caller: ThisCaller, records: TheseRecords
) -> dict[str, object]:
    """Count the tokens of a conversation. A worker does this when the call's turn comes."""
    async with read_call(request, gateway, caller, "input_counts", records.history) as incoming:
        result, _ = await incoming.prompt_tokens()
    return {"object": "response.input_tokens", "input_tokens": result.usage.prompt_tokens}


@router.post("/v1/responses/{name}", include_in_schema=False)
async def refuse_other_calls(request: Request, name: str) -> None:
    """Answer 404 for OpenAI's other calls, such as `compact`, and 405 for a response's id."""
    if is_response_id(name):
        raise method_not_allowed("POST", request.url.path, "GET, DELETE")
    raise HTTPException(404)


@router.get("/v1/responses/{response_id}", response_class=Response, **COUNTED_READ)
async def retrieve_response(
    response_id: str,
    gateway: ThisGateway,
    caller: ThisCaller,
    records: TheseRecords,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, le=_MAX_NUMBER)] = None,
) -> Response:
    """Read a stored response, or with `stream`, its events after the number `starting_after`."""
    bind(request_id=response_id)
    if starting_after is not None and not stream:
        raise wrong_field("starting_after", "needs stream=true")
    stored = await records.get(response_id, caller)
    if not stream:
        return Response(await records.current(stored), media_type=JSON)
    after = -1 if starting_after is None else starting_after
    output = await records.output(stored)
    if output is not None:
        writer = ResponseWriter(stored.call, after)
        return FramesInTurns(records.stored.turns, frames_of(writer, output))
    served = await records.served(stored)
    call = replace(stored.call, detach=True)  # so that a disconnected reader cancels nothing
    answering = AnsweredResponse(records, served, call, stored, after, at_once=True)
    return stream_of(gateway, answering)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    response_id: str, caller: ThisCaller, records: TheseRecords
) -> dict[str, object]:
    """Delete a stored response. A response that has not ended is cancelled."""
    bind(request_id=response_id)
    stored = await records.get(response_id, caller)
    await records.cancel(stored)
    await records.stored.forget(response_id, stored.tenant)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(
    "/v1/responses/{response_id}/cancel", response_class=Response, responses=described(429)
)
async def cancel_response(
    response_id: str, gateway: ThisGateway, caller: ThisCaller, records: TheseRecords
) -> Response:
    """Cancel a response of `background: true`, unless it has ended, and return it."""
    bind(request_id=response_id)
    stored = await records.get(response_id, caller)
    if stored.result is not None:
        await count_read(gateway, caller)
    if not stored.call.background:
        raise ApiError(
            400,
            "only a response with background: true can be cancelled; to cancel another one, close"
            " its connection or delete it",
        )
    await records.cancel(stored)
    return Response(await records.current(stored), media_type=JSON)


@router.get("/v1/responses/{response_id}/input_items", response_class=Response, **COUNTED_READ)
async def list_input_items(
    response_id: str,
    caller: ThisCaller,
    records: TheseRecords,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the input items of a stored response, without those of earlier responses."""
    bind(request_id=response_id)
    stored = await records.get(response_id, caller)
    lines = await records.stored.input_lines(stored)
    if order == "desc":
        lines.reverse()
    begin = 0
    if after is not None:
        ids = [id_of(line) for line in lines]
        if after.encode("utf-8", "replace") not in ids:
            raise wrong_field("after", f"no item {after[:80]!r} is known")
        begin = ids.index(after.encode()) + 1
    page = lines[begin : begin + limit]
    first, last = "null", "null"
    if page:
        first, last = (quoted(id_of(item).decode()) for item in (page[0], page[-1]))
    has_more = "true" if len(lines) > begin + limit else "false"
    data = b",".join(page).decode()
    return Response(
        f'{{"object":"list","data":[{data}],"first_id":{first},"last_id":{last}'
        f',"has_more":{has_more}}}',
        media_type=JSON,
    )
