"""Checks the rights of a call's caller, and makes the payloads of the call, such as a chat.

`compose` (clients/request_builder.py) builds and checks each payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from promptq.producer.admin.queue_views import QueueView
from promptq.producer.calls.call import CompletionCall, Extra
from promptq.producer.calls.caller import Caller, check_priority, check_tenant
from promptq.producer.calls.errors import in_api_names, unknown_completion
from promptq.producer.calls.output_lengths import Features
from promptq.producer.calls.picture_urls import with_pictures
from promptq.producer.calls.queues import ServedQueue, ServedQueues
from promptq.producer.calls.rate_costs import account_of, rates_of
from promptq.producer.clients.request_builder import compose
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import NewRequest, TokenAccount
from promptq.shared.queue.call import Call, text_of
from promptq.shared.queue.scripts import Rate


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose payloads are ready: the requests to enqueue (`new`), and their cost in each of
    the caller's rate limits (`rates`).

    `call` has only the fields that its answer needs. `features` has the features of each request if
    another process has read the call, because then the requests have no prompts here. They are
    empty if no queue needs them.
    """

    call: CompletionCall
    new: list[NewRequest]
    rates: list[Rate]
    completion_id: str
    extra: Extra | None = None
    features: Sequence[Features] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the call uses until it is enqueued."""
        num_bytes = sum(len(item.payload or b"") for item in self.new)
        pictures = {name: url for item in self.new for name, url in item.pictures.items()}
        num_bytes += sum(map(len, pictures.values()))
        return num_bytes + (0 if self.extra is None else self.extra.num_bytes)


def prepare(
    call: CompletionCall,
    caller: Caller,
    completion_id: str,
    aliases: Mapping[str, str],
    pictures: Mapping[str, str] = {},
) -> Prepared:
    """Checks the rights of a call's caller, and builds the call's payloads. Slow for a large body.

    `aliases` maps aliases to names of models, `pictures` URLs to data URLs. Raises
    InvalidRequestError, ApiError 403, PicturesNeededError.
    """
    call = granted(with_pictures(call, pictures).with_model_of(aliases), caller)
    tenant = call.fields.get("tenant") or ""
    if caller.is_own_tenant and tenant == caller.tenant:
        tenant = ""  # as in earlier releases, whose gateways may have got the same call
    requests = call.with_key_of(caller.name, tenant).requests(completion_id)
    new = composed(call, requests, account_of(caller, caller.name))
    shown = new[0].request.pictures
    rates = rates_of(caller, requests, shown)
    answer = replace(call.for_answer(), has_pictures=bool(shown))
    return Prepared(answer, new, rates, completion_id, call.extra)


def composed(
    call: CompletionCall, requests: list[dict[str, Any]], account: TokenAccount | None
) -> list[NewRequest]:
    """Returns the requests with payloads. Raises InvalidRequestError with the API's field names."""
    try:
        return compose(requests, account)
    except InvalidRequestError as error:
        message, field = in_api_names(call.names, str(error), error.field)
        raise InvalidRequestError(message, field or "", error.error_type, error.code) from None


def check_pictures_served(view: QueueView, names: Mapping[str, str]) -> None:
    """Raises InvalidRequestError if all live workers of a queue refuse pictures. `names` has the
    endpoint's names of fields; see `in_api_names`."""
    if "pictures" in view.refused:
        why = "messages: no live worker's engine serves pictures"
        message, field = in_api_names(names, why, "messages")
        raise InvalidRequestError(message, field or "", "unsupported")


def granted(call: CompletionCall, caller: Caller) -> CompletionCall:
    """Returns the call with a tenant and a priority that the caller may use.

    If the call names no tenant, sets the caller's tenant. If the call has no priority, sets the
    priority of its service tier (by default 0). If this is too urgent for the caller, sets the most
    urgent priority that the caller may use instead. Raises ApiError 403 if the call names a tenant
    or a priority that the caller may not use.
    """
    tenant, priority = call.fields.get("tenant"), call.fields.get("priority")
    if tenant is not None:
        check_tenant(caller, tenant)
    elif caller.tenant is not None:
        call = call.with_fields(tenant=caller.tenant)
    if isinstance(priority, int):
        check_priority(caller, priority)
    elif priority is None and ("service_tier" in call.fields or caller.highest_priority > 0):
        call = call.with_fields(priority=max(call.priority, caller.highest_priority))
    return call


async def payloads_of(
    queues: ServedQueues, caller: Caller, request_ids: Sequence[str]
) -> tuple[ServedQueue, list[bytes]]:
    """Returns the queue that has the requests with these ids, and the requests' payloads. Raises
    RequestNotFoundError for ids that are unknown or do not belong to the caller."""
    served = await queues.holding(request_ids[0])
    queue = served.queue
    names = [queue.keys.request(request_id) for request_id in request_ids]
    reading: list[Call[list[bytes | None]]] = [
        Call("", ["HMGET", name, "payload", "tenant"], list, lambda: [None] * 2) for name in names
    ]
    records = await queue.run(reading)
    payloads = []
    for request_id, (payload, tenant) in zip(request_ids, records, strict=True):
        is_callers = caller.is_admin or text_of(tenant or b"") == (caller.tenant or "")
        if payload is None or not is_callers:
            raise unknown_completion(request_id)
        payloads.append(payload)
    return served, payloads
