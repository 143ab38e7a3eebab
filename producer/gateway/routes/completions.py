"""Completions of a text, as in the OpenAI API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from producer.gateway.access import ThisCaller
from producer.gateway.answering import respond
from producer.gateway.bodies import read_body
from producer.gateway.context import ThisGateway
from producer.gateway.openai.calls import CompletionOptions, body_schema, read_completion

router = APIRouter(tags=["completions"])
_SCHEMA = body_schema(CompletionOptions)
_BODY = {"content": {"application/json": {"schema": _SCHEMA}}, "required": True}


@router.post("/v1/completions", openapi_extra={"requestBody": _BODY}, response_class=Response)
async def create_completion(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """The continuation of one prompt or several, whole or with `stream` token by token."""
    body = await read_body(request, gateway.settings.http_max_body_bytes)
    return await respond(request, gateway, caller, read_completion(body, request.headers))
