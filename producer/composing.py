"""Makes requests of what callers pass to a client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequestError
from shared.request_queue import new_request_id
from shared.schemas import Request
from shared.scripts import NewRequest

Prompt = str | list[int]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Composed:
    """Requests ready to be enqueued. `are_ids_new`: all ids were made here, so nobody has them."""

    new: list[NewRequest]
    are_ids_new: bool

    @property
    def is_safe_to_repeat(self) -> bool:
        """Whether an id that is taken can only mean that this very call got through before."""
        return self.are_ids_new and all(item.request.idempotency_key is None for item in self.new)


def compose(requests: Iterable[Mapping[str, Any]]) -> Composed:
    """Requests of their payloads' fields and, beside those, `request_id` and `delay_ms`.

    Raises InvalidRequestError naming the first field that is wrong.
    """
    given = [dict(fields) for fields in requests]
    are_ids_new = all(fields.get("request_id") is None for fields in given)
    return Composed([_compose_one(fields) for fields in given], are_ids_new)


def compose_samples(n: int, fields: Mapping[str, Any]) -> Composed:
    """`n` requests of one prompt: ids `ID:0` ... `ID:n-1`, seeds `seed + i` where one is given.

    Raises InvalidRequestError.
    """
    if n < 1:
        raise InvalidRequestError(f"n: {n} is not a number of samples, 1 or more", field="n")
    is_id_new = fields.get("request_id") is None
    named = {**fields, "request_id": new_request_id() if is_id_new else fields["request_id"]}
    return Composed([_compose_one(_sample(i, named)) for i in range(n)], is_id_new)


def _compose_one(fields: dict[str, Any]) -> NewRequest:
    request_id = fields.pop("request_id", None)
    delay_ms = fields.pop("delay_ms", 0)
    if not isinstance(delay_ms, int) or delay_ms < 0:
        raise InvalidRequestError(
            f"delay_ms: {delay_ms!r} is not a number of milliseconds", field="delay_ms"
        )
    request = Request.build(fields)
    return NewRequest(new_request_id() if request_id is None else request_id, request, delay_ms)


def _sample(i: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"request_id": f"{fields['request_id']}:{i}"}
    if isinstance(seed := fields.get("seed"), int):
        own["seed"] = seed + i
    if isinstance(key := fields.get("idempotency_key"), str):
        own["idempotency_key"] = f"{key}:{i}"  # one key would make all of them one request
    return {**fields, **own}


def call_fields(
    prompt: Prompt | None,
    messages: Messages | None,
    request_id: str | None,
    delay_ms: int,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """What a client's method was given, as one mapping for `compose`."""
    own = {"prompt": prompt, "messages": messages, "request_id": request_id, "delay_ms": delay_ms}
    return {**fields, **own}
