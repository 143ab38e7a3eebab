"""Reads a call of /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from promptq.producer.calls.call import (
    BodyOptions,
    CompletionCall,
    check_size_of_call,
    prompts_of,
    read_options,
)
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import Pooling, SamplingParams

NAMES = {
    "prompt": "input",
    "embed: dimensions": "dimensions",
    "embed: pooling": "pooling",
}
"""Names of fields here, by their names in a payload; see `in_api_names`."""
MAX_INPUTS = 2048
"""The limit of the OpenAI API."""


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
        names=NAMES,
    )
