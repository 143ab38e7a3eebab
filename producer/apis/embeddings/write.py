"""Writes vectors as in OpenAI's API, rankings as in Jina's, and scores as in vLLM's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from promptq.producer.calls.completion import Completion, failure
from promptq.producer.calls.errors import ApiError
from promptq.shared.protocol.events import Result


def failure_of_embedding(completion: Completion, result: Result) -> ApiError | None:
    """Returns the error of a request that ended without a vector; None if there is a vector."""
    return failure(result.finish_reason, result.error, num_tokens=0, names=completion.names)


async def embeddings_json(completion: Completion, results: Sequence[Result]) -> bytes:
    """Returns the body of the answer as JSON. Lets other tasks of the event loop run after each
    vector. Raises ApiError if a result has no vector."""
    data = []
    for index, result in enumerate(results):
        data.append(json.dumps(_datum(completion, index, result)))
        await asyncio.sleep(0)
    rest = {"object": "list", "model": completion.model, **_usage(results)}
    return f'{json.dumps(rest)[:-1]}, "data": [{", ".join(data)}]}}'.encode("ascii")


def embeddings_body(completion: Completion, results: Sequence[Result]) -> dict[str, Any]:
    """Returns the body of the answer. Raises ApiError if a result has no vector."""
    data = [_datum(completion, index, result) for index, result in enumerate(results)]
    return {"object": "list", "data": data, "model": completion.model, **_usage(results)}


def _datum(completion: Completion, index: int, result: Result) -> dict[str, Any]:
    if (error := failure_of_embedding(completion, result)) is not None:
        raise error
    try:
        numbers = result.vector
    except ValueError:  # another program wrote into the queue
        message = "the queue's record of this request has no vector"
        raise ApiError(409, message, code="spoilt_record") from None
    shown = result.embedding if completion.encoding_format == "base64" else numbers
    return {"object": "embedding", "index": index, "embedding": shown}


async def scores_json(completion: Completion, results: Sequence[Result]) -> bytes:
    """Returns the body of the answer of /v1/score. Raises ApiError if a result has no score."""
    data = []
    for index, result in enumerate(results):
        score, *_ = _datum(completion, index, result)["embedding"]
        data.append({"index": index, "object": "score", "score": score})
    shown = {"object": "list", "created": int(time.time()), "model": completion.model}
    return json.dumps({"id": completion.id, **shown, "data": data, **_usage(results)}).encode()


async def rerank_json(completion: Completion, results: Sequence[Result]) -> bytes:
    """Returns the body of the answer of /v1/rerank. Raises ApiError if a result has no score."""
    ranked = []
    for index, result in enumerate(results):
        score, *_ = _datum(completion, index, result)["embedding"]
        document = {"document": {"text": completion.echoes[index]}} if completion.echoes else {}
        ranked.append({"index": index, **document, "relevance_score": score})
    ranked.sort(key=lambda each: -each["relevance_score"])
    shown = {"model": completion.model, "results": ranked[: completion.top_n]}
    return json.dumps({"id": completion.id, **shown, **_usage(results)}).encode("ascii")


def _usage(results: Sequence[Result]) -> dict[str, Any]:
    tokens = sum(result.usage.prompt_tokens for result in results)
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
