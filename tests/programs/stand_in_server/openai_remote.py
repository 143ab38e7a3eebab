"""Speaks like a cloud's API: OpenAI's completions of texts, without token ids."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

from aiohttp import web

from tests.programs.stand_in_server.batch import Batch, BrokenError

_IDS = ("return_token_ids", "logit_bias", "stop_token_ids", "top_k")


def openai_remote_routes(batch: Batch, model: str, takes_ids: bool) -> list[web.RouteDef]:
    def error(message: str, status: int) -> web.Response:
        said = {"error": {"message": message, "type": "invalid_request_error"}}
        return web.json_response(said, status=status)

    async def models(_: web.Request) -> web.Response:
        cards = [{"id": name, "object": "model"} for name in ("another", model)]
        return web.json_response({"object": "list", "data": cards})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if batch.fault == "overload":
            return error("the server is busy", 503)
        if batch.refuses_more():
            return error("too many requests", 429)
        if body["model"] != model or batch.fault == "refuse":
            return error(f"the model {body['model']!r} does not exist", 404)
        if not isinstance(body["prompt"], str) or (wrong := {*_IDS} & body.keys()):
            return error(f"unknown fields: {wrong or 'token ids'}", 400)
        tokens = batch.generate(
            body["prompt"].encode(),
            body["max_tokens"],
            seed=body.get("seed", 0) if body.get("temperature", 1.0) else None,
        )
        if not body.get("stream"):
            async with aclosing(tokens):
                found = bytes([token_id async for token_id, _ in tokens]).decode()
            return web.json_response({"choices": [{"text": found, "finish_reason": "length"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(what: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(what)}\n\n".encode())

        try:
            async with aclosing(tokens):
                async for token_id, reason in tokens:
                    choice = {"index": 0, "text": chr(token_id), "finish_reason": reason}
                    await send({"object": "text_completion", "choices": [choice]})
        except BrokenError as broken:
            if broken.fault == "break":
                await send({"error": {"message": "internal error"}})
            elif broken.fault == "malformed":
                await send({"choices": [{"text": 7, "finish_reason": None}]})
            elif broken.fault == "abort":
                await send({"choices": [{"text": "", "finish_reason": "abort"}]})
            return response
        await send({"object": "text_completion", "choices": []})  # the usage
        await response.write(b"data: [DONE]\n\n")
        return response

    return [web.get("/v1/models", models), web.post("/v1/completions", completions)]
