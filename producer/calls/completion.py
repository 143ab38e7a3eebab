"""A call that is being answered (a completion): its ids, its model, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode
from uuid import UUID

from promptq.producer.calls.call import MAX_CHOICES, CompletionCall, request_ids
from promptq.producer.calls.errors import NOT_AGAIN, ApiError
from promptq.producer.calls.output.model_text import ExpectedOutput, needed_of
from promptq.producer.calls.queues import ServedQueue
from promptq.producer.clients.connecting import explained
from promptq.producer.clients.request_builder import Prompt
from promptq.shared.errors import InvalidRequestError, RequestNotFoundError
from promptq.shared.protocol.events import ErrorInfo, Usage, sum_of_known
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.request import FinishReason, Request, field_of
from promptq.shared.protocol.urgency import Tier, tier_of
from promptq.shared.queue.request_queue import new_request_id

_NUMBER = re.compile(r"[0-9]{1,3}")
_PREFIX = re.compile(r"[a-z]+[-_]")
_CHAT, _TEXT, _MESSAGE = "chatcmpl-", "cmpl-", "msg_"
_ECHO_ONLY = "only"


@dataclass(frozen=True, slots=True)
class Completion:
    """All data for the answer to a call, except the events of its requests.

    The request of choice number `i`, counted from 0, is `request_ids[i]`. The `n` choices of a
    prompt follow each other. `echoes` is empty unless the answer repeats the prompts. Then `echoes`
    has the prompt of each choice, or None for a prompt of token ids, whose text comes with the
    first event. With `echo_only`, the answer has only the prompts.
    """

    id: str
    is_chat: bool
    model: str
    num_choices: int = 1
    n: int = 1
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    expected: ExpectedOutput = field(default_factory=ExpectedOutput)
    include_usage: bool = False
    detach: bool = False
    echoes: Sequence[str | None] = ()
    echo_only: bool = False
    encoding_format: str | None = None
    """The encoding of vectors; None if the call requests text."""
    top_n: int | None = None
    service_tier: Tier = "default"
    prefill: str = ""
    """Text with which the call lets the output begin. The answer does not repeat this text."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps names of fields in a payload to their names in the body; see `in_api_names`."""

    @property
    def request_ids(self) -> list[str]:
        return request_ids(self.id, self.num_choices)

    @property
    def created(self) -> int:
        """Creation time in Unix seconds, from the id, so it is equal whenever a stream is read."""
        return (_uuid_of(self.id).int >> 80) // 1000

    @property
    def url(self) -> str:
        """The path of the stream. Its query has those options that a payload does not store."""
        query: dict[str, int | str] = {}
        if self.num_choices > 1:
            query = {"choices": self.num_choices, "n": self.n}
        if self.include_usage:
            query["usage"] = 1
        if self.echoes or self.echo_only:
            query["echo"] = _ECHO_ONLY if self.echo_only else 1
        if self.detach:
            query["detach"] = 1
        path = f"/v1/streams/{quote(self.id)}"
        return f"{path}?{urlencode(query)}" if query else path

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Returns the usage of all choices, in OpenAI's form. Each prompt counts once."""
        prompts = [
            Usage.of_samples(list(usages[at : at + self.n])) for at in range(0, len(usages), self.n)
        ]
        prompt_tokens = sum(each.prompt_tokens for each in prompts)
        completion_tokens = 0 if self.echo_only else sum(each.completion_tokens for each in prompts)
        body: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
        }
        reasoning_tokens = sum_of_known(each.reasoning_tokens for each in prompts)
        if reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return body


def new_completion_id(is_chat: bool) -> str:
    return (_CHAT if is_chat else _TEXT) + new_request_id()


def new_message_id() -> str:
    return _MESSAGE + new_request_id().replace("-", "")


def is_message_id(completion_id: str) -> bool:
    """Returns whether the answer of the completion with this id is a message of /v1/messages."""
    return completion_id.startswith(_MESSAGE)


def check_known_id(known: str, new_id: str) -> None:
    """Raises ApiError 409 unless two ids are of the same kind. `known` is the id that the queue
    stores for an idempotency key. `new_id` is the id of the new call.

    The check is needed, because any program with write access may have stored the id.
    """
    prefix, *_ = _PREFIX.findall(new_id)
    try:
        UUID(known.removeprefix(prefix) if known.startswith(prefix) else "")
    except ValueError:
        message = "idempotency_key: its record in the queue names no call of this endpoint"
        raise ApiError(409, message, param="idempotency_key", code="spoilt_record") from None


def check_completion_id(completion_id: str) -> None:
    """Raises RequestNotFoundError if no completion of a gateway can have this id."""
    try:
        _uuid_of(completion_id)
    except ValueError:
        raise RequestNotFoundError(f"no completion {completion_id[:80]!r} is known") from None


def completion_of(call: CompletionCall, completion_id: str, model: str) -> Completion:
    """Returns the completion of a call: all data for the answer, except the events."""
    echoes = [_text(call.prompts[index // call.n]) for index in range(call.num_choices)]
    return Completion(
        id=completion_id,
        is_chat=call.is_chat,
        model=call.model or model,
        num_choices=call.num_choices,
        n=call.n,
        with_logprobs=call.fields.get("logprobs") is not None,
        with_prompt_logprobs=call.shows_prompt_logprobs,
        expected=ExpectedOutput.of(call.fields),
        include_usage=call.include_usage,
        detach=call.detach,
        echoes=echoes if call.echo else (),
        echo_only=call.echo_only,
        encoding_format=call.encoding_format,
        top_n=call.top_n,
        service_tier=tier_of(call.priority),
        prefill=_prefill(**call.fields.get("output_prefix", {})),
        names=call.names,
    )


def shown_fields(payload: bytes, with_prompt: bool) -> dict[str, Any]:
    """Returns those fields of a payload that `stream_completion` needs. The prompt is None unless
    `with_prompt` is true. Slow for a large payload. Raises InvalidRequestError."""
    request = Request.parse(payload)
    prefix = request.output_prefix
    return {
        "prompt": _text(request.prompt) if with_prompt else None,
        "model": request.model,
        "logprobs": request.logprobs,
        "priority": request.priority,
        "prefill": "" if prefix is None else _prefill(prefix.token_ids, prefix.text),
        **needed_of(vars(request)),
    }


def stream_completion(
    completion_id: str, query: Mapping[str, str], shown: Sequence[Mapping[str, Any]], model: str
) -> Completion:
    """Returns the completion of the stream with this id and query. `shown` has the result of
    `shown_fields` for each of the `needed_request_ids`."""
    first, num_choices, n = shown[0], _number(query, "choices", 1), _number(query, "n", 1)
    prompts = [fields["prompt"] for fields in shown]
    return Completion(
        id=completion_id,
        is_chat=completion_id.startswith((_CHAT, _MESSAGE)),
        model=first["model"] or model,
        num_choices=num_choices,
        n=n,
        with_logprobs=first["logprobs"] is not None,
        expected=ExpectedOutput.of(first),
        include_usage=query.get("usage") == "1",
        detach=query.get("detach") == "1",
        echoes=[prompts[index // n] for index in range(num_choices)] if wants_echo(query) else (),
        echo_only=query.get("echo") == _ECHO_ONLY,
        service_tier=tier_of(first["priority"]),
        prefill=first["prefill"] if is_message_id(completion_id) else "",
    )


def needed_request_ids(completion_id: str, query: Mapping[str, str]) -> list[str]:
    """Returns the ids of the requests whose payloads `stream_completion` needs. If the answer
    repeats prompts, these are the first requests of all prompts. Otherwise, only the first request
    is needed.

    Raises the errors of `all_request_ids`.
    """
    ids, n = all_request_ids(completion_id, query), _number(query, "n", 1)
    return ids[::n] if wants_echo(query) else ids[:1]


def all_request_ids(completion_id: str, query: Mapping[str, str]) -> list[str]:
    """Returns the ids of all requests of the stream with this id and query. Raises
    RequestNotFoundError for a wrong id, InvalidRequestError for a wrong query."""
    check_completion_id(completion_id)
    return request_ids(completion_id, _number(query, "choices", 1))


def _uuid_of(completion_id: str) -> UUID:
    for prefix in (_CHAT, _TEXT, _MESSAGE):
        completion_id = completion_id.removeprefix(prefix)
    return UUID(completion_id)


def _prefill(token_ids: Sequence[int] = (), text: str = "") -> str:
    """Returns the text of an output prefix that the answer does not repeat. A prefix of token ids
    comes from a fork, whose answer repeats the prefix; then returns ''."""
    return "" if token_ids else text


def wants_echo(query: Mapping[str, str]) -> bool:
    """Returns whether the answer of a stream with this query repeats its prompts."""
    return query.get("echo") in ("1", _ECHO_ONLY)


def _text(prompt: Prompt | None) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (_NUMBER.fullmatch(text) and 1 <= int(text) <= MAX_CHOICES):
        raise InvalidRequestError(f"{name}: {text[:80]!r} is not 1 to {MAX_CHOICES}", field=name)
    return int(text)


def finish_reason(reason: FinishReason, num_tool_calls: int, echo_only: bool) -> str:
    """Returns OpenAI's word for why an answer ended: `stop`, `tool_calls` or `length`. `length`
    also stands for a missed deadline, and for an answer that has only the prompt."""
    if reason is FinishReason.STOP and not echo_only:
        return "tool_calls" if num_tool_calls else "stop"
    return "length"


def failure(
    reason: FinishReason | None,
    error: ErrorInfo | None,
    num_tokens: int,
    names: Mapping[str, str] = {},
) -> ApiError | None:
    """Returns the error for a request that ended after `num_tokens` output tokens; None if the
    request has an answer. `names` has the endpoint's names of fields; see `in_api_names`."""
    match reason:
        case FinishReason.ERROR:
            error = error or ErrorInfo(type="internal_error", message="it failed")
            return _failed(error).named(names)
        case FinishReason.CANCELLED:
            return ApiError(409, "the request was cancelled", code="cancelled")
        case FinishReason.EXPIRED if num_tokens == 0:
            return ApiError(
                408,
                "deadline_ms: the deadline passed before the answer began",
                param="deadline_ms",
                code="deadline_exceeded",
            )
    return None


def _failed(error: ErrorInfo) -> ApiError:
    if error.type == "dead_letter":  # each retry may crash workers
        return ApiError(500, error.message, code=error.type, headers=NOT_AGAIN)
    if error.type not in ("invalid_request", "unsupported"):
        return ApiError(500, error.message, code=error.type)
    field = field_of(error.message)
    if field == "model":
        return ApiError(404, error.message, param=field, code="model_not_found")
    return ApiError(400, error.message, param=field, code=error.code or error.type)


async def with_model_and_style(
    served: ServedQueue, completion: Completion
) -> tuple[Completion, OutputStyle | None]:
    """Returns the completion with its queue's model, and the output style of the model (None if the
    completion needs none). Call this function after the first event; see `model_and_style`."""
    if completion.model and not completion.is_chat:
        return completion, None
    model, style = await model_and_style(served, needs_style=completion.expected.with_tools)
    if not completion.model:
        completion = replace(completion, model=model)
    return completion, style


async def model_and_style(
    served: ServedQueue, *, needs_style: bool = True
) -> tuple[str, OutputStyle | None]:
    """Returns the queue's model and output style, which workers store before the first event.

    The style is None if no worker has stored one. Without `needs_style`, the style may also be None
    because the gateway has not read it yet. Raises RedisSideError.
    """
    with explained(served.client.url):
        view = await served.view()
        lacks_style = view.output_style is None and needs_style
        if not view.model or lacks_style:  # a worker may have written them just now
            view = await served.view(now=True)
    return view.model, view.output_style
