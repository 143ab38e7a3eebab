"""Converts the body of a call of /v1/embeddings to a `CompletionCall`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_body import (
    BodyOptions,
    check_size_of_call,
    prompts_of,
    read_options,
    refuse,
    without_none,
    wrong_field,
)
from promptq.shared.protocol.request import Pooling, SamplingParams

NAMES = {
    "prompt": "input",
    "embed: dimensions": "dimensions",
    "embed: pooling": "pooling",
}
"""Maps names of fields in a payload to their names in the body; see `in_api_names`."""
MAX_INPUTS = 2048
"""The most inputs of one call, as in the OpenAI API."""
_OF_OTHER_ENDPOINTS = ("prompt", "messages", "embed", "tokenize", "detach", "stream")


class EmbeddingOptions(BodyOptions):
    """The fields of /v1/embeddings."""

    input: str | list[Any] = Field(description="text or token ids, or a list of either")
    dimensions: int | None = Field(
        None, ge=1, description="keep this many numbers of each vector; left out: all"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: of little-endian float32"
    )
    pooling: Pooling | None = Field(None, description="left out: the worker's setting")
    normalize: bool = Field(True, description="scale each vector to the length 1")
    user: str | None = Field(None, description="accepted without effect")


def read_embedding_call(body: bytes, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/embeddings. Raises InvalidRequestError."""
    options, fields = read_options(EmbeddingOptions, body, headers)
    refuse(fields, [*SamplingParams.model_fields, *_OF_OTHER_ENDPOINTS])
    if not options.input:
        raise wrong_field("input", "is empty")
    prompts = prompts_of("input", options.input)
    if len(prompts) > MAX_INPUTS:
        raise wrong_field(
            "input", f"{len(prompts)} inputs are more than the {MAX_INPUTS} of one call"
        )
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise wrong_field("input", f"item {place} is empty")
    check_size_of_call(len(body), fields, len(prompts), named="input")
    fields["embed"] = without_none({"pooling": options.pooling, "dimensions": options.dimensions})
    if not options.normalize:
        fields["embed"]["normalize"] = False
    return options.call(
        fields,
        len(body),
        is_chat=False,
        prompts=prompts,
        encoding_format=options.encoding_format,
        form="embeddings",
        names=NAMES,
    )
