"""Speaks like SGLang's server in `/v1/completions`, which also stops at the model's end token."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

from aiohttp import web
from llguidance import LLMatcher, LLTokenizer

from tests.programs.stand_in_server.batch import VOCAB_SIZE, Batch, BrokenError

_METRICS = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{engine_type="unified",model_name="{model}",tp_rank="0"}} {running}
sglang:num_queue_reqs{{engine_type="unified",model_name="{model}",tp_rank="0"}} {waiting}
sglang:token_usage{{engine_type="unified",model_name="{model}",tp_rank="0"}} {kv_usage}
"""
_OWN_END = VOCAB_SIZE - 1
_ROOM = 6
"""Tokens of a context that the server keeps free."""


def sglang_routes(
    batch: Batch,
    model: str,
    takes_ids: bool,
    vocabulary: LLTokenizer | None = None,
    _: bool = False,
) -> list[web.RouteDef]:
    """Returns the routes. Without a vocabulary, the routes refuse grammars as SGLang's backend
    xgrammar refuses promptq's form of grammars."""

    def error(message: str, code: int) -> dict[str, Any]:
        kind = "SERVICE_UNAVAILABLE" if code == 503 else "BadRequestError"
        return {"object": "error", "message": message, "type": kind, "param": None, "code": code}

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "model_path": f"/models/{model}",
                "served_model_name": model,
                "max_req_input_len": batch.max_model_len,
                "max_total_num_tokens": batch.kv_tokens,
                "page_size": 1,
                "enable_deterministic_inference": False,
            }
        )

    async def metrics(_: web.Request) -> web.Response:
        told = {name: float(value) for name, value in batch.told().items()}
        text = _METRICS.format(model=model, kv_usage=batch.kv_usage, **told)
        return web.Response(text=text)

    async def tokenize(request: web.Request) -> web.Response:
        tokens = [*(await request.json())["prompt"].encode()]
        told = {"count": len(tokens), "max_model_len": batch.max_model_len + _ROOM}
        return web.json_response({**told, "tokens": tokens})

    async def completion(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, is_stream = body["prompt"], body.get("stream", False)
        if not any(prompt):
            return web.json_response(error("Prompt cannot be empty", 400), status=400)
        if isinstance(prompt[0], list):
            (prompt,) = prompt
        if batch.fault == "overload" or batch.refuses_more():
            said = error("The request queue is full.", 503)
            return web.json_response(said, status=503)
        if batch.fault == "refuse":
            return web.json_response({"detail": "Not Found"}, status=404)
        if len(prompt) >= batch.max_model_len + _ROOM:
            said = f"The input ({len(prompt)} tokens) is longer than the model's context length"
            return web.json_response(error(said, 400), status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        grammar, why = None, ""
        if ebnf := body.get("ebnf"):
            if vocabulary is not None:
                grammar = LLMatcher(vocabulary, ebnf, log_level=0)
            why = grammar.get_error() if grammar else "directive %llguidance is not supported"
            why = "refused" if batch.fault == "refuse_grammars" else why
        if is_stream:
            await response.prepare(request)
        if why:  # in a stream: its first event
            said = error(f"Failed to compile ebnf grammar: {why}", 400)
            if not is_stream:
                return web.json_response(said, status=400)
            await send({"error": said})
            await response.write(b"data: [DONE]\n\n")
            return response
        ends = {_OWN_END, *(body.get("stop_token_ids") or ())}
        tokens = batch.generate(
            prompt,
            body.get("max_tokens", 16),
            ends=() if body.get("ignore_eos") else ends,
            seed=body.get("seed", 42) if body.get("temperature", 1.0) else None,
            bias={int(key): by for key, by in (body.get("logit_bias") or {}).items()},
            grammar=grammar,
        )
        found: list[int] = []

        def choice(token_ids: list[int], reason: str | None) -> dict[str, Any]:
            is_shown = body.get("return_token_ids") and takes_ids
            told = {
                "index": 0,
                "text": "",
                "logprobs": None,
                "finish_reason": reason,
                "matched_stop": token_ids[-1] if reason == "stop" else None,
                "token_ids": token_ids if is_shown else None,
            }
            kind = {"id": "1", "object": "text_completion", "created": 1, "model": model}
            return {**kind, "choices": [told]}

        try:
            async with aclosing(tokens):
                async for token_id, reason in tokens:
                    found.append(token_id)
                    if is_stream:
                        await send(choice([token_id], reason))
        except BrokenError as broken:
            if broken.fault == "break":
                await send({"error": error("Generation aborted.", 500)})
            elif broken.fault == "abort":
                await send(choice([], "abort"))
            elif broken.fault == "malformed":
                await send({"choices": [{"token_ids": 7}]})
            elif broken.fault == "foreign":
                await send(choice([VOCAB_SIZE], None))
            if broken.fault == "end":
                return response
        if not is_stream:
            return web.json_response(choice(found, reason))
        await response.write(b"data: [DONE]\n\n")
        return response

    return [
        web.get("/server_info", server_info),
        web.get("/metrics", metrics),
        web.post("/tokenize", tokenize),
        web.post("/v1/completions", completion),
    ]
