"""Converts texts to tokens and back, under the same paths as vLLM's server.

The gateway has no tokenizer, so a worker answers each call, without its engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_body import without_none
from promptq.producer.calls.call_to_payloads import prepare
from promptq.producer.calls.caller import Caller
from promptq.producer.calls.completion import new_completion_id
from promptq.producer.http.auth import ThisCaller, needs
from promptq.producer.http.errors import described
from promptq.producer.http.json_body import described_body, json_body
from promptq.producer.http.rate_limits import admit_call
from promptq.producer.http.state import Gateway, ThisGateway
from promptq.producer.http.submit import IncomingCall
from promptq.shared.protocol.events import Result
from promptq.shared.protocol.request import Objects, TokenIds
from promptq.shared.runtime.large_json import written

router = APIRouter(
    tags=["tokens"],
    responses=described(400, 401, 403, 404, 413, 429, 500, 503),
    dependencies=[needs("completions")],
)


class _ModelField(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(
        None, description="null or empty: the model of the gateway's own queue"
    )


class Tokenize(_ModelField):
    """The body of /tokenize: a text, or a chat that the model's template renders."""

    prompt: str | None = Field(None, description="a text; give this or `messages`")
    messages: Objects | None = Field(None, min_length=1)
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] = Field(True, description="only this value is supported")
    return_token_strs: bool = Field(False, description="also report the text of each token")


class Detokenize(_ModelField):
    """The body of /detokenize: token ids of the model."""

    tokens: TokenIds = Field(min_length=1)


@router.post("/tokenize", openapi_extra=described_body(Tokenize))
async def tokenize(
    body: Annotated[Tokenize, Depends(json_body(Tokenize))],
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
) -> Response:
    """Return the tokens of a text or a chat, and their number."""
    names = ("messages", "tools", "chat_template_kwargs")
    fields = without_none({name: getattr(body, name) for name in names})
    result, max_model_len = await _tokens_of(
        request, gateway, caller, body.model, body.prompt, fields
    )
    tokens = result.prompt_token_ids or []
    answer = {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": result.prompt_texts if body.return_token_strs else None,
    }
    text = await gateway.client.turns.run(written(answer))
    return Response(text, media_type="application/json")


@router.post("/detokenize", openapi_extra=described_body(Detokenize))
async def detokenize(
    body: Annotated[Detokenize, Depends(json_body(Detokenize))],
    request: Request,
    gateway: ThisGateway,
    caller: ThisCaller,
) -> dict[str, object]:
    """Return the text of tokens. A special token appears as its name."""
    result, _ = await _tokens_of(request, gateway, caller, body.model, body.tokens, {})
    return {"prompt": "".join(result.prompt_texts or ())}


async def _tokens_of(
    request: Request,
    gateway: Gateway,
    caller: Caller,
    model: str | None,
    prompt: str | list[int] | None,
    fields: dict[str, Any],
) -> tuple[Result, int | None]:
    """Returns a result with the tokens of a prompt, or of the chat in `fields`, and the model's
    context length (None if unknown)."""
    await admit_call(gateway, caller)
    is_chat = "messages" in fields
    call = CompletionCall(
        is_chat=is_chat,
        fields={**fields, "tokenize": True, **({"model": model} if model else {})},
        prompts=[prompt],
        names={"prompt": "tokens"} if isinstance(prompt, list) else {},
    )
    completion_id = new_completion_id(is_chat)
    prepared = prepare(call, caller, completion_id, await gateway.queues.aliases())
    return await IncomingCall(request, gateway, caller, prepared).prompt_tokens()
