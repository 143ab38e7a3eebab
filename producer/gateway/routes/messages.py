"""Messages, as in Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from promptq.producer.gateway.answering.reading.call_reader import ThisCallReader
from promptq.producer.gateway.answering.respond_message import respond_message
from promptq.producer.gateway.answering.respond_tokens import told_tokens
from promptq.producer.gateway.anthropic.request_body import CountOptions, MessageOptions
from promptq.producer.gateway.context.access import ThisCaller, needs
from promptq.producer.gateway.context.gateway import ThisGateway
from promptq.producer.gateway.http.errors import MessagesErrorAnswer, described
from promptq.producer.gateway.routes.completions import operation, prepared_call

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
    async with prepared_call(request, gateway, caller, call_reader, "messages") as (prepared, hold):
        return await respond_message(request, gateway, caller, prepared, hold)


@router.post("/v1/messages/count_tokens", openapi_extra=operation(CountOptions))
async def count_tokens(
    request: HttpRequest, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> dict[str, int]:
    """Count the tokens of a conversation. A worker does that, in the order of the queue."""
    async with prepared_call(request, gateway, caller, call_reader, "counts") as (prepared, hold):
        result, _ = await told_tokens(request, gateway, caller, prepared, hold)
    return {"input_tokens": result.usage.prompt_tokens}
