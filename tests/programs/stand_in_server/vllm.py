"""Speaks like vLLM's server."""

from __future__ import annotations

import hashlib
import json
import math
from base64 import b64encode
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from aiohttp import web
from llguidance import LLMatcher, LLTokenizer

from promptq.worker.upstream.vllm_plugin.promptq_vllm_plugin import NUM_EMITTED
from tests.programs.stand_in_server.batch import VOCAB_SIZE, Batch, BrokenError

_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="{model}",reason="capacity"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="{model}",reason="deferred"}} 7.0
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} {kv_usage}
vllm:cache_config_info{{block_size="16",cache_dtype="auto",kv_cache_size_tokens="{kv_tokens}"}} 1.0
"""

PLACE = 257
"""The token that stands for a picture in a prompt."""
OF_ADAPTER = 1000
"""Adapters add this to the prompt's first token, so that their outputs are others."""


def vllm_routes(
    batch: Batch,
    model: str,
    takes_ids: bool,
    vocabulary: LLTokenizer | None = None,
    has_plugin: bool = False,
    has_pictures: bool = False,
    adapters: dict[str, str] | None = None,
) -> list[web.RouteDef]:
    """Returns the routes. Without a vocabulary, the routes ignore grammars. With promptq's plugin,
    grammars may begin inside of an output. With pictures, each place in a prompt becomes the tokens
    of a picture. `adapters` maps names to folders."""
    adapters = {} if adapters is None else adapters

    def error(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def models(_: web.Request) -> web.Response:
        entry = {
            "id": model,
            "object": "model",
            "created": 1,
            "owned_by": "vllm",
            "root": f"/models/{model}",
            "parent": None,
            "max_model_len": batch.max_model_len,
            "permission": [],
        }
        cards = [
            {**entry, "id": name, "root": root, "parent": model, "max_model_len": None}
            for name, root in adapters.items()
        ]
        return web.json_response({"object": "list", "data": [entry, *cards]})

    async def load(request: web.Request) -> web.Response:
        body = await request.json()
        if batch.fault == "forbid_adapters":
            return web.json_response({"detail": "Not Found"}, status=404)
        if body["lora_name"] in adapters:
            said = f"The lora adapter '{body['lora_name']}' has already been loaded."
            return web.json_response(error(said, "InvalidUserInput", 400), status=400)
        adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def unload(request: web.Request) -> web.Response:
        del adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    async def metrics(_: web.Request) -> web.Response:
        text = _METRICS.format(
            model=model,
            running=float(batch.told()["running"]),
            waiting=float(batch.told()["waiting"]),
            kv_usage=batch.kv_usage,
            kv_tokens=batch.kv_tokens,
        )
        return web.Response(text=text)

    async def tokenize(request: web.Request) -> web.Response:
        tokens = [*(await request.json())["prompt"].encode()]
        told = {"count": len(tokens), "max_model_len": batch.max_model_len, "tokens": tokens}
        return web.json_response({**told, "token_strs": None})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not takes_ids:
            said = "Multimodal token-in token-out is not enabled; use --enable-scale-out"
            return web.json_response(error(said, "Forbidden", 403), status=403)
        if body.get("model") not in (None, model, *adapters) or batch.fault == "refuse":
            said = f"The model `{body.get('model')}` does not exist. Valid aliases: {model}."
            return web.json_response(error(said, "NotFoundError", 404, "model"), status=404)
        if batch.fault == "overload":
            said = "The server has too many queued requests"
            return web.json_response(error(said, "ServiceUnavailable", 503), status=503)
        if batch.refuses_more():
            said = error("Too many requests", "TooManyRequests", 429)
            return web.json_response(said, status=429, headers={"Retry-After": "0"})
        params, prompt = body["sampling_params"], body["token_ids"]
        has_usage = (body.get("stream_options") or {}).get("continuous_usage_stats", False)
        if has_pictures and (parts := body.get("content_parts")):
            if batch.fault == "refuse_pictures":
                said = "Failed to load image: image file is truncated"
                return web.json_response(error(said, "BadRequestError", 400), status=400)
            if prompt.count(PLACE) < len(parts):
                said = "Failed to apply prompt replacement for mm_items['image'][0]"
                return web.json_response(error(said, "InternalServerError", 500), status=500)
            if batch.fault == "break_pictures":
                said = "Image size (400000000 pixels) exceeds limit"
                return web.json_response(error(said, "InternalServerError", 500), status=500)
            for part in parts:
                at = prompt.index(PLACE)
                prompt = [*prompt[:at], *tokens_of_picture(part["url"]), *prompt[at + 1 :]]
        if batch.fault == "break_reports" and params.get("prompt_logprobs") is not None:
            return web.json_response(error("broken", "InternalServerError", 500), status=500)
        if batch.fault == "forbid_masks" and "allowed_token_ids" in params:
            return web.json_response(error("not here", "Forbidden", 403), status=403)
        is_stream = body.get("stream", False)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        grammar = None
        if vocabulary is not None and (wanted := params.get("structured_outputs")):
            grammar = LLMatcher(vocabulary, wanted["grammar"], log_level=0)
            why = "refused" if batch.fault == "refuse_grammars" else grammar.get_error()
            if why:
                refusal = error(f"Grammar error: {why}", "BadRequestError", 400)
                return web.json_response(refusal, status=400)
            if has_plugin and (num_emitted := params["extra_args"][NUM_EMITTED]):
                grammar.consume_tokens(prompt[-num_emitted:])
        if is_stream:
            await response.prepare(request)
        if (worst := max(prompt)) >= VOCAB_SIZE:
            said = error(f"Token id {worst} is out of vocabulary", "BadRequestError", 400)
            if not is_stream:
                return web.json_response(said, status=400)
            await send(said)
            await response.write(b"data: [DONE]\n\n")
            return response
        temperature = params.get("temperature", 1.0)
        bias = {int(key): by for key, by in (params.get("logit_bias") or {}).items()}
        if body.get("model") in adapters:
            prompt = [prompt[0] + OF_ADAPTER, *prompt[1:]]
        tokens = batch.generate(
            prompt,
            params.get("max_tokens") or batch.max_model_len,
            ends=params.get("stop_token_ids") or (),
            min_tokens=params.get("min_tokens", 0),
            seed=params.get("seed", 0) if temperature else None,
            bias=bias,
            allowed=params.get("allowed_token_ids"),
            grammar=grammar,
        )
        found: list[int] = []
        try:
            async with aclosing(tokens):
                async for token_id, reason in tokens:
                    found.append(token_id)
                    if is_stream:
                        num_top = params.get("logprobs")
                        event = _event([token_id], reason, num_top, body.get("request_id"))
                        if has_usage:
                            event["usage"] = {"prompt_tokens": len(prompt)}
                        await send(event)
        except BrokenError as broken:
            said = "EngineCore encountered an issue. See stack trace for the root cause."
            if not is_stream:
                return web.json_response(error(said, "InternalServerError", 500), status=500)
            if broken.fault == "break":
                await send(error(said, "InternalServerError", 500))
            elif broken.fault == "abort":
                await send(_event([], "abort", None, body.get("request_id")))
            elif broken.fault == "malformed":
                await send({"choices": [{"token_ids": 7}]})
            elif broken.fault == "foreign":
                await send(_event([VOCAB_SIZE], None, None, body.get("request_id")))
            if broken.fault == "end":
                return response
        if not is_stream:
            whole = _event(found, "length", None, body.get("request_id"))
            del whole["usage"]  # only events have it
            num_top = params.get("prompt_logprobs")
            if num_top is not None and batch.fault != "unreport":
                whole["prompt_logprobs"] = report = _of_prompt(prompt, num_top)
                if batch.fault == "spoil":
                    report[-1][str(prompt[-1])]["logprob"] = math.nan
            return web.json_response(whole)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def completion(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        if body["model"] not in (model, *adapters):
            said = f"The model `{body['model']}` does not exist."
            return web.json_response(error(said, "NotFoundError", 404, "model"), status=404)
        if body["model"] in adapters:
            prompt = [prompt[0] + OF_ADAPTER, *prompt[1:]]
        bias = {int(key): by for key, by in (body.get("logit_bias") or {}).items()}
        seed = body.get("seed", 0) if body["temperature"] else None
        tokens = batch.generate(prompt, body["max_tokens"], seed=seed, bias=bias)
        choices = [{"index": 0, "text": "", "token_ids": list[int](), "finish_reason": "length"}]
        if not body.get("stream"):
            async with aclosing(tokens):
                choices[0]["token_ids"] = [token_id async for token_id, _ in tokens]
            return web.json_response({"object": "text_completion", "choices": choices})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async with aclosing(tokens):
                async for token_id, reason in tokens:
                    choices[0] |= {"token_ids": [token_id], "finish_reason": reason}
                    await response.write(f"data: {json.dumps({'choices': choices})}\n\n".encode())
        except BrokenError:
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def chat(request: web.Request) -> web.Response:
        if not has_pictures:
            return web.json_response(
                error("not a vision model", "BadRequestError", 400), status=400
            )
        ((message,)) = (await request.json())["messages"]
        num_pictures = sum(part["type"] == "image_url" for part in message["content"])
        return web.json_response({"usage": {"prompt_tokens": 9 + 5 * num_pictures}})

    return [
        web.post("/v1/chat/completions", chat),
        web.get("/version", version),
        web.get("/v1/models", models),
        web.get("/metrics", metrics),
        web.get("/health", health),
        web.post("/tokenize", tokenize),
        web.post("/v1/load_lora_adapter", load),
        web.post("/v1/unload_lora_adapter", unload),
        web.post("/inference/v1/generate", generate),
        web.post("/v1/completions", completion),
    ]


def tokens_of_picture(url: str) -> list[int]:
    """Returns the tokens that replace a picture's place in a prompt."""
    return [*hashlib.sha256(url.encode()).digest()[:5]]


def _of_prompt(prompt: list[int], num_top: int) -> list[Any]:
    """Returns log-probabilities of a prompt. The tokens 0, 1, ... are the likeliest at each
    place."""
    likeliest = {
        str(token_id): {"logprob": -1.0 - token_id, "rank": token_id + 1, "decoded_token": None}
        for token_id in range(num_top)
    }
    report: list[Any] = [None]
    for token_id in prompt[1:]:
        own = {"logprob": -1.0 - token_id, "rank": token_id + 1, "decoded_token": None}
        report.append({str(token_id): own, **likeliest})
    return report


def _event(
    token_ids: list[int], reason: str | None, num_top: int | None, request_id: str | None
) -> dict[str, Any]:
    content = [
        {
            "token_id": token_id,
            "logprob": -0.5,
            "rank": 1,
            "top_logprobs": [
                {"token_id": token_id + other, "logprob": -0.5 - other, "rank": other + 1}
                for other in range(max(1, num_top or 0))
            ],
        }
        for token_id in token_ids
    ]
    choice = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "logprobs": None if num_top is None else {"content": content},
    }
    return {
        "request_id": f"generate-tokens-{request_id}",
        "usage": None,
        "output_mode": "tokens",
        "choices": [choice],
    }


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """Returns the vector of a prompt. The vector is not normalised."""
    return [float(len(token_ids)), float(token_ids[0]), float(token_ids[-1]), 0.5]


def pooling_routes(batch: Batch, model: str, only_scores: bool) -> list[web.RouteDef]:
    """Returns the routes of a server for pooling that differ from `vllm_routes`."""

    async def missing(_: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async def embeddings(request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != model or batch.fault == "refuse":
            error = {"message": "no such model", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if batch.fault == "break":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if batch.fault == "too_long":
            status = 500 if "embd_normalize" in body else 400  # llama.cpp's field and status
            said = {"message": "input (9 tokens) is too large to process.", "code": status}
            return web.json_response({"error": said}, status=status)
        vectors = []
        for number, token_ids in enumerate(body["input"]):
            vector = np.array(vector_of(token_ids), "<f4")
            if body.get("use_activation", True) and body.get("embd_normalize", 2) >= 0:
                vector /= np.linalg.norm(vector)
            if batch.fault == "spoil":
                vector[0] = math.nan
            shown: object = vector.tolist()
            if body.get("encoding_format") == "base64":
                shown = b64encode(vector.tobytes()).decode()
            vectors.append({"index": number, "object": "embedding", "embedding": shown})
        usage = {"prompt_tokens": sum(map(len, body["input"])), "total_tokens": 0}
        return web.json_response(
            {"id": "embd-1", "object": "list", "model": model, "data": vectors, "usage": usage}
        )

    async def rerank(request: web.Request) -> web.Response:
        body = await request.json()
        query, documents = body["query"], body["documents"]
        if batch.fault == "break":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if batch.fault == "too_long":
            said = {"message": "the input is too long", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": said}, status=400)
        results = [
            {"index": number, "document": {"text": text}, "relevance_score": score}
            for number, text in enumerate(documents)
            for score in [math.nan if batch.fault == "spoil" else score_of(query, text)]
        ]
        num_tokens = sum(len(query) + len(text) + 3 for text in documents)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return web.json_response(
            {"id": "score-1", "model": model, "usage": usage, "results": results}
        )

    others = ("/inference/v1/generate", "/v1/completions", "/completion")
    computed = [] if only_scores else [web.post("/v1/embeddings", embeddings)]
    if only_scores:
        others = (*others, "/v1/embeddings")
        computed.append(web.post("/v1/rerank", rerank))
    return [*computed, *(web.post(path, missing) for path in others)]


def score_of(query: str, document: str) -> float:
    """Returns the share of the query's letters that are in the document."""
    return len({*query} & {*document}) / len({*query})
