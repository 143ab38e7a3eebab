"""Writes vectors in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from promptq.producer.apis.embeddings.read import NAMES
from promptq.producer.calls.completion import Completion, failure
from promptq.producer.calls.errors import ApiError
from promptq.shared.protocol.events import Result


def failure_of_embedding(result: Result) -> ApiError | None:
    """Returns the error of a request that ended without a vector; None if there is a vector."""
    return failure(result.finish_reason, result.error, num_tokens=0, names=NAMES)


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
    if (error := failure_of_embedding(result)) is not None:
        raise error
    try:
        numbers = result.vector
    except ValueError:  # another program wrote into the queue
        message = "the queue's record of this request has no vector"
        raise ApiError(409, message, code="spoilt_record") from None
    shown = result.embedding if completion.encoding_format == "base64" else numbers
    return {"object": "embedding", "index": index, "embedding": shown}


def _usage(results: Sequence[Result]) -> dict[str, Any]:
    tokens = sum(result.usage.prompt_tokens for result in results)
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
