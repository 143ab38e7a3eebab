"""Serves until killed: `python -m tests.programs.stand_in_server vllm --port 8000`.

`GET /stand-in` lists running requests. `POST /stand-in {"fault": "freeze"}` makes the server fail
(see `FAULTS`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from llguidance import LLTokenizer

from promptq.worker.text.grammars.llguidance_calls import Vocabulary
from tests.programs.stand_in_server.batch import VOCAB_SIZE, Batch
from tests.programs.stand_in_server.llama_cpp import llama_cpp_routes
from tests.programs.stand_in_server.openai_remote import openai_remote_routes
from tests.programs.stand_in_server.sglang import sglang_routes
from tests.programs.stand_in_server.vllm import pooling_routes, vllm_routes

ROUTES: dict[str, Callable[..., list[web.RouteDef]]] = {
    "vllm": vllm_routes,
    "llama.cpp": llama_cpp_routes,
    "sglang": sglang_routes,
    "openai-remote": openai_remote_routes,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.stand_in_server", description=__doc__
    )
    parser.add_argument("dialect", choices=ROUTES)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--token-seconds", type=float, default=0.003)
    parser.add_argument("--kv-tokens", type=int, default=None)
    parser.add_argument(
        "--most-at-once", type=float, default=math.inf, help="refuse further requests with 429"
    )
    parser.add_argument("--without-metrics", action="store_true")
    parser.add_argument(
        "--without-ids", action="store_true", help="behave like a server without --enable-scale-out"
    )
    parser.add_argument("--model", default="m")
    parser.add_argument("--key", default=None)
    parser.add_argument(
        "--grammars", metavar="DIR", help="mask by grammars, with the tokenizer in this folder"
    )
    parser.add_argument("--pictures", action="store_true", help="with vllm: have a vision model")
    parser.add_argument(
        "--lora", metavar="NAME=FOLDER", action="append", help="with vllm or llama.cpp: an adapter"
    )
    parser.add_argument("--pooling", action="store_true", help="compute vectors, and no tokens")
    parser.add_argument("--scores", action="store_true", help="score documents, nothing else")
    parser.add_argument(
        "--plugin", action="store_true", help="with --grammars: behave as vLLM with our plugin does"
    )
    options = parser.parse_args()
    batch = Batch(
        options.max_num_seqs,
        options.max_model_len,
        options.token_seconds,
        options.kv_tokens,
        options.most_at_once,
    )

    @web.middleware
    async def check_key(request: web.Request, handler: web.Handler) -> web.StreamResponse:
        wanted = f"Bearer {options.key}"
        if options.key is not None and request.headers.get("Authorization") != wanted:
            return web.json_response({"error": "Unauthorized"}, status=401)
        if options.without_metrics and request.path == "/metrics":
            return web.json_response({"error": "not supported"}, status=501)
        return await handler(request)

    async def tell(_: web.Request) -> web.Response:
        return web.json_response(batch.told())

    async def fail(request: web.Request) -> web.Response:
        batch.fail((await request.json())["fault"])
        return web.json_response({})

    app = web.Application(middlewares=[check_key])
    more = [_vocabulary(Path(options.grammars)), options.plugin] if options.grammars else []
    named: dict[str, Any] = {"has_pictures": True} if options.pictures else {}
    if options.lora:
        named["adapters"] = dict(each.split("=", 1) for each in options.lora)
    routes = ROUTES[options.dialect](batch, options.model, not options.without_ids, *more, **named)
    if options.pooling or options.scores:
        routes = [*pooling_routes(batch, options.model, options.scores), *routes]
    app.add_routes(routes)
    app.add_routes([web.get("/stand-in", tell), web.post("/stand-in", fail)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, handler_cancellation=True)


def _vocabulary(folder: Path) -> LLTokenizer:
    content = (folder / "tokenizer.json").read_text()
    return Vocabulary(content, VOCAB_SIZE, [VOCAB_SIZE - 1]).load()


if __name__ == "__main__":
    main()
