"""Speaks like vLLM's server that was started for pooling."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence

import numpy as np
from aiohttp import web

from tests.programs.stand_in_server.batch import Batch


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """Returns a vector, which is not normalised."""
    return [float(len(token_ids)), float(token_ids[0]), float(token_ids[-1]), 0.5]


def pooling_routes(batch: Batch, model: str) -> list[web.RouteDef]:
    """Returns the routes that differ from those of a server that generates."""

    async def generate(_: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async def embeddings(request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != model or batch.fault == "refuse":
            error = {"message": "no such model", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if batch.fault == "break":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        vectors = []
        for number, token_ids in enumerate(body["input"]):
            vector = np.array(vector_of(token_ids), "<f4")
            if body.get("use_activation", True):
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

    return [web.post("/inference/v1/generate", generate), web.post("/v1/embeddings", embeddings)]
