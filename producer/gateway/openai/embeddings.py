"""A call of /v1/embeddings: its body as requests, and their results as its answer.

The endpoint has other names for some fields of a payload, so errors name them as the caller does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from promptq.producer.gateway.http.errors import ApiError
from promptq.producer.gateway.openai.completion import Completion
from promptq.producer.gateway.openai.endings import failure
from promptq.producer.gateway.openai.request_bodies import (
    BodyOptions,
    CompletionCall,
    check_size_of_call,
    prompts_of,
    read_options,
)
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.events import ErrorInfo, Result
from promptq.shared.protocol.request import FinishReason, Pooling, SamplingParams

MAX_INPUTS = 2048
"""As in the OpenAI API."""

_RENAMED = (("embed: dimensions:", "dimensions:"), ("embed: pooling:", "pooling:"))


class EmbeddingOptions(BodyOptions):
    """The fields of /v1/embeddings."""

    input: str | list[Any] = Field(description="text or token ids, or a list of either")
    dimensions: int | None = Field(
        None, ge=1, description="keep so many numbers of each vector; left out: all"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: of little-endian float32"
    )
    pooling: Pooling | None = Field(None, description="left out: as the worker has it")
    normalize: bool = Field(True, description="give each vector the length 1")
    user: str | None = Field(None, description="accepted without effect")


def read_embedding_call(body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    """Raises InvalidRequestError naming the field, or the header, that is wrong."""
    options, fields = read_options(EmbeddingOptions, body, headers)
    for name in (
        *SamplingParams.model_fields,
        "prompt",
        "messages",
        "embed",
        "tokenize",
        "detach",
        "stream",
    ):
        if name in fields:
            raise InvalidRequestError(f"{name}: is not a field of this endpoint", field=name)
    if not options.input:
        raise InvalidRequestError("input: is empty", field="input")
    prompts = prompts_of("input", options.input)
    if len(prompts) > MAX_INPUTS:
        raise InvalidRequestError(
            f"input: {len(prompts)} inputs are more than the {MAX_INPUTS} of one call",
            field="input",
        )
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequestError(f"input: item {place} is empty", field="input")
    check_size_of_call(len(body), fields, len(prompts), named="input")
    asked = {"pooling": options.pooling, "dimensions": options.dimensions}
    fields["embed"] = {name: value for name, value in asked.items() if value is not None}
    if not options.normalize:
        fields["embed"]["normalize"] = False
    return CompletionCall(
        is_chat=False,
        fields=fields,
        prompts=prompts,
        wait_for_worker=options.wait_for_worker,
        body_bytes=len(body),
        encoding_format=options.encoding_format,
        form="embeddings",
    )


def as_asked(error: InvalidRequestError) -> InvalidRequestError:
    """The error with the names of fields that this endpoint has."""
    message = _renamed(str(error))
    return InvalidRequestError(message, field=message.partition(":")[0])


def failure_of_embedding(result: Result) -> ApiError | None:
    """The error for a request without a vector; None if it has one."""
    reason, error = result.finish_reason, result.error
    if error is not None:
        error = error.model_copy(update={"message": _renamed(error.message)})
    elif reason is FinishReason.STOP and result.embedding is None:
        reason, error = FinishReason.ERROR, ErrorInfo(type="internal_error", message="no vector")
    return failure(reason, error, num_tokens=0)


async def embeddings_json(completion: Completion, results: Sequence[Result]) -> bytes:
    """The body of the answer. Other calls have their turns while a long one is written.

    Raises ApiError if a result is no vector.
    """
    data = []
    for index, result in enumerate(results):
        data.append(json.dumps(_datum(completion, index, result)))
        await asyncio.sleep(0)
    rest = {"object": "list", "model": completion.model, **_usage(results)}
    return f'{json.dumps(rest)[:-1]}, "data": [{", ".join(data)}]}}'.encode("ascii")


def embeddings_body(completion: Completion, results: Sequence[Result]) -> dict[str, Any]:
    """The same as Python values."""
    data = [_datum(completion, index, result) for index, result in enumerate(results)]
    return {"object": "list", "data": data, "model": completion.model, **_usage(results)}


def _datum(completion: Completion, index: int, result: Result) -> dict[str, Any]:
    if (error := failure_of_embedding(result)) is not None:
        raise error
    try:
        numbers = result.vector
    except ValueError:  # a stranger wrote into the queue
        raise ApiError(500, "the queue's record of this request is no vector") from None
    shown = result.embedding if completion.encoding_format == "base64" else numbers
    return {"object": "embedding", "index": index, "embedding": shown}


def _usage(results: Sequence[Result]) -> dict[str, Any]:
    tokens = sum(result.usage.prompt_tokens for result in results)
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _renamed(message: str) -> str:
    for inner, outer in (*_RENAMED, ("prompt:", "input:")):
        if message.startswith(inner):
            return outer + message.removeprefix(inner)
    return message
