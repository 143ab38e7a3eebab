"""Messages, as in Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from promptq.producer.gateway.answering.reading.call_reader import (
    CallReader,
    Endpoint,
    ThisCallReader,
)
from promptq.producer.gateway.answering.respond import Prepared
from promptq.producer.gateway.answering.respond_message import respond_message
from promptq.producer.gateway.answering.respond_tokens import told_tokens
from promptq.producer.gateway.anthropic.request_body import CountOptions, MessageOptions
from promptq.producer.gateway.context.access import Caller, ThisCaller, needs
from promptq.producer.gateway.context.caller_rates import admit_call
from promptq.producer.gateway.context.gateway import Gateway, ThisGateway
from promptq.producer.gateway.http.bodies import body_pieces
from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import MessagesErrorAnswer, described
from promptq.producer.gateway.routes.completions import operation

router = APIRouter(
    tags=["messages"],
    responses=described(
        400, 401, 403, 404, 408, 409, 413, 429, 500, 503, model=MessagesErrorAnswer
    ),
    dependencies=[needs("completions")],
)


@router.post("/v1/messages", openapi_extra=operation(MessageOptions), response_class=Response)
async def create_message(
    request: HttpRequest, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> Response:
    """Answer a conversation, in one piece or, with `stream`, as it is generated."""
    async with _prepared(request, gateway, caller, call_reader, "messages") as (prepared, hold):
        return await respond_message(request, gateway, caller, prepared, hold)


@router.post("/v1/messages/count_tokens", openapi_extra=operation(CountOptions))
async def count_tokens(
    request: HttpRequest, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> dict[str, int]:
    """Count the tokens of a conversation. A worker does that, in the order of the queue."""
    async with _prepared(request, gateway, caller, call_reader, "counts") as (prepared, hold):
        result, _ = await told_tokens(request, gateway, caller, prepared, hold)
    return {"input_tokens": result.usage.prompt_tokens}


@asynccontextmanager
async def _prepared(
    request: HttpRequest,
    gateway: Gateway,
    caller: Caller,
    call_reader: CallReader,
    endpoint: Endpoint,
) -> AsyncIterator[tuple[Prepared, Hold]]:
    """The call and the hold on its body, which ends with the block."""
    await admit_call(gateway, caller)
    with gateway.bodies.hold(caller.party) as hold:
        most = gateway.settings.http_max_body_bytes
        body = [piece async for piece in body_pieces(request, most, hold)]
        aliases = await gateway.queues.aliases()
        prepared = await call_reader.prepare(endpoint, body, request.headers, caller, aliases)
        hold.grow_to(sum(len(it.payload or b"") for it in prepared.new))
        yield replace(prepared, taken=1), hold
