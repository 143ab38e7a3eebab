"""The queue's output: the events of a request, and the result that they fold into.

Their JSON forms are public. Field names follow the OpenAI API and vLLM.
"""

from __future__ import annotations

import base64
import json
import json.encoder
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from promptq.shared.protocol.request import FinishReason

_quoted = json.encoder.encode_basestring


StoredTokenId = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _numbers(values: list[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _array(items: Sequence[BaseModel | None] | None) -> str:
    if items is None:
        return "null"
    return f"[{','.join('null' if item is None else item.model_dump_json() for item in items)}]"


class _Wire(BaseModel):
    """Base of the data that workers send. Unknown fields are ignored.

    NaN and infinity are refused, because JSON has neither and pydantic would write null.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    def to_json(self) -> str:
        """Returns the public JSON form, without fields that are not set."""
        return self.__pydantic_serializer__.to_json(self, exclude_none=True).decode()


class TopLogprob(_Wire):
    """One of the likeliest tokens at a position, with its natural log-probability."""

    token_id: int
    logprob: float
    token: str | None = None


class TokenLogprob(_Wire):
    """Natural log-probability of an output or prompt token, before any sampling parameter.

    `rank` is 1 for the likeliest token. `top` has the likeliest tokens, or null if the request
    wants none. `token` is the text of this one token; parts of characters become U+FFFD.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[TopLogprob] | None = None
    token: str | None = None


class _WithPrompt(_Wire):
    """Prompt fields of the first event and the result, if `prompt_logprobs` or `tokenize` is set.

    Each list has one entry for each token of the prompt. The first log-probability is null. The
    texts, joined, are the prompt.
    """

    prompt_token_ids: list[StoredTokenId] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt_texts: list[str] | None = None

    @property
    def prompt_json(self) -> str:
        """Returns the JSON of the prompt's fields that are set, with a comma in front."""
        if self.prompt_texts is None:
            return ""
        return prompt_json(self.prompt_texts, self.prompt_logprobs, self.prompt_token_ids)


class Usage(_Wire):
    """Token counts. `completion_tokens` counts the emitted tokens of all attempts.

    `reasoning_tokens` is the number of completion tokens between the marks of reasoning, such as
    `<think>`. The number is None if the model does not reason, or if a mark begins or ends inside a
    token.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @classmethod
    def of_samples(cls, usages: list[Usage]) -> Usage:
        """Returns the usage of several samples of one prompt. The prompt counts once."""
        if not usages:
            return cls()
        return cls(
            prompt_tokens=max(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
            reasoning_tokens=sum_of_known(usage.reasoning_tokens for usage in usages),
        )


def sum_of_known(counts: Iterable[int | None]) -> int | None:
    """Returns the sum of the counts; None if a count is None or if there are no counts."""
    values = list(counts)
    known = [count for count in values if count is not None]
    return sum(known) if values and len(known) == len(values) else None


class Stats(_Wire):
    """Times and counts of a request. `queue_ms` is the time from enqueueing until the last
    attempt's prefill begins; the other times are within the last attempt."""

    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    generation_ms: float = 0.0
    tokens_per_second: float = 0.0
    attempts: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    preempted_at: list[int] | None = None
    """Unix milliseconds of preemptions; None instead of an empty list, which Lua writes as {}."""
    resumed_at: list[int] | None = None
    resumed_inexactly: bool = False
    """Whether tokens after a resume may differ from the tokens of a run without interruption. Even
    then, the stream has no gap and no repetition."""

    def to_json(self) -> str:
        """Returns the public JSON form, with all fields."""
        return self.__pydantic_serializer__.to_json(self).decode()


class ErrorInfo(_Wire):
    """An error: a stable `type` for programs, a sentence for people."""

    type: str
    message: str
    code: str | None = None
    """Distinguishes errors that have the same `type`, for programs."""


class TokenEvent(_WithPrompt):
    """One message of a request's stream. `index` is the number of earlier output tokens.

    If another program has written an entry to the request's log, `index` continues from the id of
    that entry. So `index` may be as large as a stream id.
    """

    index: Annotated[int, Field(ge=0, le=2**64)]
    token_ids: list[StoredTokenId]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    attempt: int = 0
    usage: Usage | None = None
    stats: Stats | None = None
    error: ErrorInfo | None = None
    embedding: str | None = None
    """The vector of a request with `embed`, as base64 of little-endian float32."""
    stop_reason: str | None = None
    """The stop string that ended the output; only the last event has one."""

    @property
    def end(self) -> int:
        """Number of the request's output tokens up to and including this event."""
        return self.index + len(self.token_ids)

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None

    def to_json(self) -> str:
        """Returns the public JSON form. `usage`, `stats`, `error`, `embedding`, `stop_reason` and
        the prompt's fields are left out if they are not set."""
        reason = "null" if self.finish_reason is None else f'"{self.finish_reason.value}"'
        parts = (("usage", self.usage), ("stats", self.stats), ("error", self.error))
        return token_event_json(
            self.index,
            self.token_ids,
            self.text,
            self.logprobs,
            self.attempt,
            reason,
            self.prompt_json
            + "".join(f',"{name}":{part.to_json()}' for name, part in parts if part is not None)
            + texts_json(embedding=self.embedding, stop_reason=self.stop_reason),
        )


class Result(_WithPrompt):
    """The result of a finished request: all its events folded into one object."""

    text: str
    token_ids: list[StoredTokenId]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason
    usage: Usage
    stats: Stats | None = None
    error: ErrorInfo | None = None
    embedding: str | None = None
    """The vector of a request with `embed`, as base64 of little-endian float32."""
    stop_reason: str | None = None

    @property
    def vector(self) -> list[float]:
        """The numbers of the embedding, as a list. Raises ValueError if there is no embedding, or
        if a number is NaN or infinite."""
        if self.embedding is None:
            raise ValueError("the result has no embedding")
        numbers = array("f", base64.b64decode(self.embedding, validate=True))
        if sys.byteorder == "big":
            numbers.byteswap()
        if not all(map(math.isfinite, numbers)):
            raise ValueError("the embedding contains a NaN or an infinity")
        return numbers.tolist()

    def to_json(self) -> str:
        """Returns the JSON that the request's hash stores."""
        return result_json(
            self.text,
            self.token_ids,
            self.logprobs,
            self.finish_reason,
            self.usage.to_json(),
            "null" if self.stats is None else self.stats.to_json(),
            "null" if self.error is None else self.error.to_json(),
            self.prompt_json + texts_json(embedding=self.embedding, stop_reason=self.stop_reason),
        )

    @classmethod
    def fold(cls, events: list[TokenEvent]) -> Result:
        """Returns the result of a whole stream. Raises ValueError unless `events` ends with the
        request's last event."""
        last = events[-1]
        if last.finish_reason is None:
            raise ValueError("the stream has no last event yet")
        logprobs = [item for event in events for item in event.logprobs or ()]
        return cls(
            text="".join(event.text for event in events),
            token_ids=[token_id for event in events for token_id in event.token_ids],
            logprobs=logprobs or None,
            finish_reason=last.finish_reason,
            usage=last.usage or Usage(),
            stats=last.stats,
            error=last.error,
            prompt_logprobs=events[0].prompt_logprobs,
            prompt_texts=events[0].prompt_texts,
            prompt_token_ids=events[0].prompt_token_ids,
            embedding=last.embedding,
            stop_reason=last.stop_reason,
        )


def prompt_json(
    texts: list[str],
    logprobs: Sequence[TokenLogprob | None] | None = None,
    token_ids: list[int] | None = None,
) -> str:
    """Returns the JSON of a prompt's fields, with a comma in front, to append to other fields."""
    fields = f',"prompt_texts":[{",".join(map(_quoted, texts))}]'
    if logprobs is not None:
        fields += f',"prompt_logprobs":{_array(logprobs)}'
    if token_ids is not None:
        fields += f',"prompt_token_ids":{_numbers(token_ids)}'
    return fields


def token_event_json(
    index: int,
    token_ids: list[int],
    text: str,
    logprobs: Sequence[TokenLogprob] | None,
    attempt: int,
    finish_reason: str = "null",
    more: str = "",
) -> str:
    """Returns the JSON of a `TokenEvent` without building the object, because this runs for each
    token. `finish_reason` is JSON. `more` has further fields, with a comma in front."""
    numbers = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
    return (
        f'{{"index":{index},"token_ids":[{numbers}],"text":{_quoted(text)}'
        f',"logprobs":{_array(logprobs)}'
        f',"finish_reason":{finish_reason},"attempt":{attempt}{more}}}'
    )


def result_json(
    text: str,
    token_ids: list[int],
    logprobs: Sequence[TokenLogprob] | None,
    finish_reason: FinishReason,
    usage: str,
    stats: str,
    error: str,
    more: str = "",
) -> str:
    """Returns the JSON of a `Result` without building the object. `usage`, `stats` and `error` are
    JSON. `more` has further fields, with a comma in front."""
    return (
        f'{{"text":{_quoted(text)},"token_ids":{_numbers(token_ids)},"logprobs":{_array(logprobs)}'
        f',"finish_reason":"{finish_reason.value}","usage":{usage},"stats":{stats}'
        f',"error":{error}{more}}}'
    )


def texts_json(**texts: str | None) -> str:
    """Returns a JSON field for each text that is not None, with a comma in front of each field."""
    return "".join(f',"{name}":{_quoted(text)}' for name, text in texts.items() if text is not None)
