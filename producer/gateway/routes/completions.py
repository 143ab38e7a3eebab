"""Completions, chats and embeddings, as in the OpenAI API, and their descriptions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from promptq.producer.gateway.answering.reading.call_reader import (
    CallReader,
    Endpoint,
    ThisCallReader,
)
from promptq.producer.gateway.answering.respond import Prepared, check_stream, respond
from promptq.producer.gateway.answering.respond_embeddings import respond_embeddings
from promptq.producer.gateway.answering.response_records import ResponseRecords
from promptq.producer.gateway.anthropic.field_names import NAMES as NAMES_OF_MESSAGES
from promptq.producer.gateway.anthropic.request_body import CountOptions
from promptq.producer.gateway.context.access import Caller, ThisCaller, needs
from promptq.producer.gateway.context.caller_rates import admit_call
from promptq.producer.gateway.context.gateway import Gateway, ThisGateway
from promptq.producer.gateway.http.bodies import body_pieces
from promptq.producer.gateway.http.body_budget import Hold
from promptq.producer.gateway.http.errors import described
from promptq.producer.gateway.openai.embeddings import EmbeddingOptions
from promptq.producer.gateway.openai.request_bodies import (
    DEFAULT_MAX_TOKENS,
    HEADERS,
    BodyOptions,
    ChatOptions,
    CompletionOptions,
    GeneratingOptions,
)
from promptq.producer.gateway.responses.field_names import NAMES as NAMES_OF_RESPONSES
from promptq.producer.gateway.responses.request_body import InputOptions
from promptq.shared.protocol.request import OutputPrefix, Request, SamplingParams

router = APIRouter(
    tags=["completions"],
    responses=described(400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    dependencies=[needs("completions")],
)

_RESUMED = ("chats", "completions")
"""Endpoints whose streams may be resumed by sending the call again."""


def operation(kind: type[BodyOptions]) -> dict[str, Any]:
    """The headers and the body of an endpoint, for FastAPI's `openapi_extra`."""
    schema = _body_schema(kind)
    parameters = [
        _header(
            header, schema["properties"][name], f"the field `{name}`, if the body does not have it"
        )
        for name, header in HEADERS.items()
        if name in schema["properties"]
    ]
    if "stream" in schema["properties"]:
        about = "with `stream`: continue after this event"
        parameters.append(_header("Last-Event-ID", {"type": "string"}, about))
    body = {"content": {"application/json": {"schema": schema}}, "required": True}
    return {"parameters": parameters, "requestBody": body}


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _body_schema(kind: type[BodyOptions]) -> dict[str, Any]:
    """The endpoint's options and the fields of a payload."""
    own = kind.model_json_schema()
    fields: dict[str, Any] = Request.model_json_schema()["properties"]
    fields["output_prefix"] = OutputPrefix.model_json_schema()
    hidden = {"messages", "prompt", "trace_context", "embed", "tokenize"}
    if kind is not ChatOptions:
        hidden |= {"tools", "tool_choice", "chat_template_kwargs"}
    if not issubclass(kind, GeneratingOptions):
        hidden |= {*SamplingParams.model_fields, "resume", "output_prefix"}
    if kind is CompletionOptions:
        fields["max_tokens"]["description"] = f"default: {DEFAULT_MAX_TOKENS}"
    if issubclass(kind, CountOptions):
        hidden |= {*NAMES_OF_MESSAGES, "logprobs", "prompt_logprobs"}
    if issubclass(kind, InputOptions):
        hidden |= {*NAMES_OF_RESPONSES, "prompt_logprobs"}
    rest = {name: value for name, value in fields.items() if name not in hidden}
    properties = {**rest, **own["properties"]}
    required = own.get("required", [])
    return {"type": "object", "properties": properties, "required": required}


@router.post("/v1/chat/completions", openapi_extra=operation(ChatOptions), response_class=Response)
async def create_chat_completion(
    request: HttpRequest, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> Response:
    """Answer a chat, in one piece or, with `stream`, as it is generated."""
    return await _create(request, gateway, caller, call_reader, "chats")


@router.post("/v1/completions", openapi_extra=operation(CompletionOptions), response_class=Response)
async def create_completion(
    request: HttpRequest, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> Response:
    """Continue one prompt or several, in one piece or, with `stream`, as it is generated."""
    return await _create(request, gateway, caller, call_reader, "completions")


@router.post("/v1/embeddings", openapi_extra=operation(EmbeddingOptions), response_class=Response)
async def create_embeddings(
    request: HttpRequest, gateway: ThisGateway, caller: ThisCaller, call_reader: ThisCallReader
) -> Response:
    """Turn one text or several into vectors."""
    return await _create(request, gateway, caller, call_reader, "embeddings")


async def _create(
    request: HttpRequest,
    gateway: Gateway,
    caller: Caller,
    call_reader: CallReader,
    endpoint: Endpoint,
) -> Response:
    answer = respond_embeddings if endpoint == "embeddings" else respond
    async with read_call(request, gateway, caller, call_reader, endpoint) as (prepared, hold):
        return await answer(request, gateway, caller, prepared, hold)


@asynccontextmanager
async def read_call(
    request: HttpRequest,
    gateway: Gateway,
    caller: Caller,
    call_reader: CallReader,
    endpoint: Endpoint,
    records: ResponseRecords | None = None,
) -> AsyncIterator[tuple[Prepared, Hold]]:
    """Count a call, and read it. Yields it and the hold on its body, which ends with the block.

    `records` are those that the call may continue.
    """
    await admit_call(gateway, caller)
    if endpoint in _RESUMED and (last_event_id := request.headers.get("last-event-id")):
        await check_stream(gateway, caller, last_event_id)
    with gateway.bodies.hold(caller.party) as hold:
        most = gateway.settings.http_max_body_bytes
        body = [piece async for piece in body_pieces(request, most, hold)]
        num_bytes = sum(map(len, body))

        async def history_of(response_id: str) -> bytes:
            assert records is not None
            return await records.history(
                response_id, caller, lambda size: hold.grow_to(num_bytes + size)
            )

        aliases = await gateway.queues.aliases()
        prepared = await call_reader.prepare(
            endpoint, body, request.headers, caller, aliases, history_of
        )
        hold.grow_to(prepared.num_bytes)
        yield prepared, hold
