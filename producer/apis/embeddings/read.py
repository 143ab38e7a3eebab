"""Converts the bodies of calls of /v1/embeddings, /v1/rerank and /v1/score to
`CompletionCall`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.call_body import (
    Body,
    BodyOptions,
    check_size_of_call,
    prompts_of,
    read_options,
    refuse,
    without_none,
    wrong_field,
)
from promptq.shared.protocol.request import Pooling, SamplingParams

_NAMES = {
    "prompt": "input",
    "embed: dimensions": "dimensions",
    "embed: pooling": "pooling",
}
"""Maps names of fields in a payload to their names in the body; see `in_api_names`."""
MAX_INPUTS = 2048
"""The most inputs of one call, as in the OpenAI API."""
_NAMES_OF_RERANK = {"prompt": "documents", "embed: query": "query", "embed": "query"}
_NAMES_OF_SCORE = {"prompt": "text_2", "embed: query": "text_1", "embed": "text_1"}
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


def read_embedding_call(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/embeddings. Raises InvalidRequestError."""
    options, fields = read_options(EmbeddingOptions, body, headers)
    prompts = prompts_of("input", options.input) if options.input else []
    _check("input", fields, prompts, body.num_bytes)
    fields["embed"] = without_none({"pooling": options.pooling, "dimensions": options.dimensions})
    if not options.normalize:
        fields["embed"]["normalize"] = False
    return options.call(
        fields,
        body.num_bytes,
        is_chat=False,
        prompts=prompts,
        encoding_format=options.encoding_format,
        form="embeddings",
        names=_NAMES,
    )


class RerankOptions(BodyOptions):
    """The fields of /v1/rerank, as in vLLM and in Jina's API."""

    query: str = Field(min_length=1)
    documents: list[str | dict[str, Any]] = Field(description="texts, or objects with a `text`")
    top_n: int | None = Field(None, ge=1, description="the most documents in the answer")
    return_documents: bool = Field(False, description="repeat the documents in the answer")
    user: str | None = Field(None, description="accepted without effect")


def read_rerank_call(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/rerank. Raises InvalidRequestError."""
    options, fields = read_options(RerankOptions, body, headers)
    texts = [each.get("text") if isinstance(each, dict) else each for each in options.documents]
    _check("documents", fields, texts, body.num_bytes + len(texts) * len(options.query))
    fields["embed"] = {"query": options.query}
    return options.call(
        fields,
        body.num_bytes,
        is_chat=False,
        prompts=texts,
        form="rerank",
        names=_NAMES_OF_RERANK,
        echo=options.return_documents,
        top_n=options.top_n,
    )


class ScoreOptions(BodyOptions):
    """The fields of /v1/score, as in vLLM."""

    text_1: str = Field(min_length=1, description="the text to which each other text is compared")
    text_2: str | list[str] = Field(description="one or more texts")
    user: str | None = Field(None, description="accepted without effect")


def read_score_call(body: Body, headers: Mapping[str, str]) -> CompletionCall:
    """Parses a call of /v1/score. Raises InvalidRequestError."""
    options, fields = read_options(ScoreOptions, body, headers)
    texts = [options.text_2] if isinstance(options.text_2, str) else options.text_2
    _check("text_2", fields, texts, body.num_bytes + len(texts) * len(options.text_1))
    fields["embed"] = {"query": options.text_1}
    return options.call(
        fields, body.num_bytes, is_chat=False, prompts=texts, form="score", names=_NAMES_OF_SCORE
    )


def _check(field: str, fields: dict[str, Any], prompts: Sequence[Any], num_bytes: int) -> None:
    """Raises InvalidRequestError if a call has fields of other endpoints, or a wrong number or size
    of prompts."""
    refuse(fields, [*SamplingParams.model_fields, *_OF_OTHER_ENDPOINTS])
    if not prompts:
        raise wrong_field(field, "is empty")
    if len(prompts) > MAX_INPUTS:
        raise wrong_field(
            field, f"{len(prompts)} inputs are more than the {MAX_INPUTS} of one call"
        )
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise wrong_field(field, f"item {place} is empty")
    check_size_of_call(num_bytes, fields, len(prompts), named=field)
