"""Reads the payloads of requests that were enqueued before, for those who own them."""

from __future__ import annotations

from collections.abc import Sequence

from promptq.producer.gateway.context.access import Caller
from promptq.producer.gateway.context.served_queues import ServedQueue
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.queue.call import Call, text_of


async def payloads_of(
    served: ServedQueue, caller: Caller, request_ids: Sequence[str]
) -> list[bytes]:
    """The payloads. Raises RequestNotFoundError for ids that are unknown or not the caller's."""
    queue = served.queue
    names = [queue.keys.request(request_id) for request_id in request_ids]
    reading: list[Call[list[bytes | None]]] = [
        Call("", ["HMGET", name, "payload", "tenant"], list, lambda: [None] * 2) for name in names
    ]
    records = await queue.run(reading)
    payloads = []
    for request_id, (payload, tenant) in zip(request_ids, records, strict=True):
        is_theirs = caller.is_admin or text_of(tenant or b"") == (caller.tenant or "")
        if payload is None or not is_theirs:
            raise RequestNotFoundError(
                f"no completion {request_id[:80]!r} is known; it never was, or its record has"
                " expired"
            )
        payloads.append(payload)
    return payloads
