"""Builds payloads from the arguments of a client's method, or from a call of the HTTP API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json, to_json

from promptq.producer.clients.affinity import affinity_of
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.keys import check_request_id
from promptq.shared.protocol.pictures import check_found, set_apart
from promptq.shared.protocol.request import MAX_MS, NewRequest, Request, TokenAccount, check_size
from promptq.shared.queue.request_queue import new_request_id

_REPLACEMENT = "\ufffd".encode()

Prompt = str | list[int]
Messages = list[dict[str, Any]]


def compose(
    requests: Iterable[Mapping[str, Any]], account: TokenAccount | None = None
) -> list[NewRequest]:
    """Builds one request from each mapping of fields.

    The fields are those of a payload, and optionally `request_id`, `delay_ms` and `durability`. All
    output is charged to the rate limit `account`. Raises InvalidRequestError for a wrong field.
    """
    composed = [_compose_one(dict(fields)) for fields in requests]
    return [replace(new, account=account) for new in composed] if account else composed


def compose_samples(n: int, fields: Mapping[str, Any]) -> list[NewRequest]:
    """Returns `n` requests with one prompt, the ids `ID:0` ... `ID:n-1`, and the seeds `seed + i`.
    Raises InvalidRequestError."""
    if n < 1:
        raise InvalidRequestError(f"n: {n} is not a number of samples, 1 or more", field="n")
    named = _named(fields)
    return [_compose_one(_sample(i, named)) for i in range(n)]


def compose_embeddings(
    texts: Prompt | Sequence[Prompt], fields: Mapping[str, Any]
) -> list[NewRequest]:
    """Returns a request for each text. If there are several texts, the ids are `ID:0` ... `ID:n-1`.
    Raises InvalidRequestError."""
    if not texts:
        raise InvalidRequestError("texts: is empty", field="texts")
    if isinstance(texts, str) or isinstance(texts[0], int):
        return [_compose_one({**fields, "prompt": texts})]
    named = _named(fields)
    return [_compose_one({**_sample(i, named), "prompt": text}) for i, text in enumerate(texts)]


def _compose_one(fields: dict[str, Any]) -> NewRequest:
    request_id = fields.pop("request_id", None)
    delay_ms = fields.pop("delay_ms", 0)
    if not isinstance(delay_ms, int) or not 0 <= delay_ms <= MAX_MS:
        raise InvalidRequestError(
            f"delay_ms: is not a number of milliseconds from 0 to {MAX_MS}", field="delay_ms"
        )
    durability = fields.pop("durability", None)
    if durability not in (None, "replicated"):
        raise InvalidRequestError(
            f"durability: must be 'replicated' or left out, got {durability!r:.80}",
            field="durability",
        )
    try:
        request = Request.build(fields)
        payload = request.to_payload().encode()
        from_json(payload)  # workers cannot read JSON that is nested so deeply
        if _REPLACEMENT in payload:  # perhaps for a surrogate in a member's name: this raises then
            to_json(request.model_dump(exclude={"prompt"}, exclude_defaults=True))
        affinity = affinity_of(request)
    except (ValueError, RecursionError):
        raise _unfit_for_json(fields) from None
    check_size(len(payload))
    own_id = new_request_id() if request_id is None else request_id
    new = NewRequest(own_id, request, delay_ms, durability=durability, affinity=affinity)
    if not (request.messages and request.pictures):
        return new
    try:
        check_found(request.pictures)
    except ValueError as error:
        raise InvalidRequestError(str(error), field="messages") from None
    messages, pictures = set_apart(request.messages, request.tenant or "")
    if not pictures:
        return new
    bare = request.model_copy(update={"messages": messages, "trace_context": None})
    payload = bare.to_payload().encode()
    return replace(new, payload=payload, pictures=pictures)


def _unfit_for_json(fields: dict[str, Any]) -> InvalidRequestError:
    """Returns the error for the field whose value is not JSON, such as half a surrogate pair."""
    for name, value in fields.items():
        try:
            from_json(to_json({name: value}))
        except (ValueError, RecursionError) as error:
            why = str(error).removeprefix("Error serializing to JSON: ")
            return InvalidRequestError(
                f"{name}: cannot be sent as JSON that workers read: {why}", field=name
            )
    return InvalidRequestError("payload: is nested too deeply", field="payload")


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with a valid `request_id`, which is new if they have none."""
    request_id = fields.get("request_id")
    checked_id = new_request_id() if request_id is None else check_request_id(request_id)
    return {**fields, "request_id": checked_id}


def _sample(i: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"request_id": f"{fields['request_id']}:{i}"}
    if isinstance(seed := fields.get("seed"), int):
        own["seed"] = seed + i
    if isinstance(key := fields.get("idempotency_key"), str):
        own["idempotency_key"] = f"{key}:{i}"  # with the same key, all would be one request
    return {**fields, **own}


def call_fields(
    prompt: Prompt | None,
    messages: Messages | None,
    request_id: str | None,
    delay_ms: int,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Returns the arguments of a client's method as one mapping for `compose`."""
    own = {"prompt": prompt, "messages": messages, "request_id": request_id, "delay_ms": delay_ms}
    return {**fields, **own}
