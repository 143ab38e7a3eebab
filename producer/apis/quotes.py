"""Answers calls of /v1/quote."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from promptq.producer.apis.completions.route import CHAT, COMPLETION
from promptq.producer.apis.messages.route import MESSAGE
from promptq.producer.apis.responses.route import RESPONSE, TheseRecords
from promptq.producer.calls.call_reader import Endpoint
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.errors import described
from promptq.producer.http.openapi import any_of
from promptq.producer.http.state import ThisGateway
from promptq.producer.http.submit import read_call

Path = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]

_QUOTED: dict[Path, tuple[Endpoint, dict[str, Any]]] = {
    "/v1/chat/completions": ("chats", CHAT),
    "/v1/completions": ("completions", COMPLETION),
    "/v1/responses": ("responses", RESPONSE),
    "/v1/messages": ("messages", MESSAGE),
}
"""Maps a path to the reader of its bodies, and to their description."""

router = APIRouter(
    tags=["completions"],
    responses=described(400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    dependencies=[needs("completions")],
)


@router.post("/v1/quote", openapi_extra=any_of(body for _, body in _QUOTED.values()))
async def quote(
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
    records: TheseRecords,
    endpoint: Annotated[
        Path | None,
        Query(
            description="path for which the body is; by default a chat's if it has `messages`,"
            " otherwise a completion's"
        ),
    ] = None,
) -> dict[str, object]:
    """Estimate when a call would start and end if it were enqueued now.

    Of several answers, this is the quote of the last. A time is null if it is unknown; `because`
    says why.
    """
    reader: Endpoint = "quotes" if endpoint is None else _QUOTED[endpoint][0]
    async with read_call(request, gateway, caller, reader, records.history) as incoming:
        served, _ = await incoming.queue()
        prepared = incoming.prepared
        new = served.with_guesses(prepared.new, prepared.features, watch=False)
        found = await served.client.quote_composed(new)
    return {"object": "quote", **asdict(found)}
