"""Completions of a text, as in the OpenAI API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from producer.gateway.access import ThisCaller
from producer.gateway.answering import respond
from producer.gateway.bodies import read_body
from producer.gateway.context import ThisGateway
from producer.gateway.openai.calls import CompletionOptions, read_completion
from producer.gateway.openai.describing import ERRORS, operation

router = APIRouter(tags=["completions"], responses=ERRORS)


@router.post("/v1/completions", openapi_extra=operation(CompletionOptions), response_class=Response)
async def create_completion(request: Request, gateway: ThisGateway, caller: ThisCaller) -> Response:
    """The continuation of one prompt or several, whole or with `stream` as it comes."""
    body = await read_body(request, gateway.settings.http_max_body_bytes)
    return await respond(request, gateway, caller, read_completion(body, request.headers))
