"""Speaks like llama.cpp's server, which leaves tokens inside of a character out of its streams.
Here a space counts as such a token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from tests.programs.stand_in_server.batch import VOCAB_SIZE, Batch, BrokenError
from tests.programs.stand_in_server.vllm import OF_ADAPTER

_LEFT_OUT = ord(" ")
_MOST_REMEMBERED = 10**9
"""The server reserves four bytes for each token that a penalty looks back at."""
_METRICS = """\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing {running}
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred {waiting}
"""
_TYPES = {"stop": "eos", "length": "limit"}


def llama_cpp_routes(
    batch: Batch, model: str, takes_ids: bool, *, adapters: Sequence[str] = ()
) -> list[web.RouteDef]:
    """Returns the routes. An adapter changes the output: its routes add a number to the prompt's
    first token. The number is OF_ADAPTER for the last name, and larger for the others."""
    names = sorted(adapters, reverse=True)

    def error(message: str, kind: str, code: int) -> web.Response:
        told = {"error": {"code": code, "message": message, "type": kind}}
        return web.json_response(told, status=code)

    async def props(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "default_generation_settings": {"params": {}, "n_ctx": batch.max_model_len},
                "total_slots": batch.max_num_seqs,
                "model_alias": model,
                "model_ftype": "all F32",
                "model_path": f"/models/{model}.gguf",
                "build_info": "b1-0c1e570",
            }
        )

    async def metrics(_: web.Request) -> web.Response:
        told = batch.told()
        return web.Response(text=_METRICS.format(**told))

    async def slots(_: web.Request) -> web.Response:
        num_running = batch.told()["running"]
        slots = range(batch.max_num_seqs)
        told = [{"id": slot, "is_processing": slot < num_running} for slot in slots]
        return web.json_response(told)

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": [*(await request.json())["content"].encode()]})

    async def lora_adapters(_: web.Request) -> web.Response:
        cards = [
            {"id": place, "path": f"/models/{name}.gguf", "scale": 1.0}
            for place, name in enumerate(adapters)
        ]
        return web.json_response(cards)

    async def embeddings(_: web.Request) -> web.Response:
        said = "This server does not support embeddings. Start it with `--embeddings`"
        return error(said, "not_supported_error", 501)

    async def rerank(_: web.Request) -> web.Response:
        said = "This server does not support reranking. Start it with `--reranking`"
        return error(said, "not_supported_error", 501)

    async def completion(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, is_stream = body["prompt"], body.get("stream", False)
        if batch.fault == "overload":
            return error("Loading model", "unavailable_error", 503)
        if batch.refuses_more():
            return error("Too many requests", "unavailable_error", 429)
        if max(prompt) >= VOCAB_SIZE:
            return error("Prompt contains invalid tokens", "invalid_request_error", 400)
        if len(prompt) >= batch.max_model_len:
            said = f"request ({len(prompt)} tokens) exceeds the available context size"
            return error(said, "exceed_context_size_error", 400)
        for lora in body.get("lora", ()):
            more = OF_ADAPTER * (1 + names.index([*adapters][lora["id"]])) * int(lora["scale"])
            prompt = [prompt[0] + more, *prompt[1:]]
        is_penalised = body.get("repeat_penalty", 1.0) != 1.0
        if is_penalised and body.get("repeat_last_n", 64) > _MOST_REMEMBERED:
            said = "Failed to initialize samplers: std::bad_alloc"
            return error(said, "invalid_request_error", 400)
        tokens = batch.generate(
            prompt,
            body["n_predict"],
            seed=body.get("seed", 0) if body.get("temperature", 0.8) else None,
            bias=dict(body.get("logit_bias", ())),
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if is_stream:
            await response.prepare(request)
        found: list[int] = []
        last_reason = None

        def event(token_ids: list[int], reason: str | None) -> dict[str, Any]:
            told = {
                "index": 0,
                "content": "",
                "tokens": token_ids if body.get("return_tokens") and takes_ids else [],
                "id_slot": -1,
                "stop": reason is not None,
                "tokens_predicted": len(found),
                "tokens_evaluated": len(prompt),
            }
            if reason is None:
                return told
            told["stop_type"] = _TYPES[reason]
            kept = body.get("response_fields") or told.keys()  # of whole answers and last events
            return {name: value for name, value in told.items() if name in kept}

        async def send(what: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(what)}\n\n".encode())

        try:
            async with aclosing(tokens):
                async for token_id, reason in tokens:
                    found.append(token_id)
                    last_reason = reason
                    if is_stream and token_id != _LEFT_OUT:
                        await send(event([token_id], None))
        except BrokenError:
            return response  # the stream ends without an error
        if not is_stream:
            return web.json_response(event(found, last_reason))
        await send(event([], last_reason))
        return response

    return [
        web.get("/props", props),
        web.get("/metrics", metrics),
        web.get("/slots", slots),
        web.post("/tokenize", tokenize),
        web.post("/completion", completion),
        web.get("/lora-adapters", lora_adapters),
        web.post("/v1/embeddings", embeddings),
        web.post("/v1/rerank", rerank),
    ]
