"""Reads the payloads of requests that were enqueued before, for those who own them."""

from __future__ import annotations

from collections.abc import Sequence

from promptq.producer.gateway.context.access import Caller
from promptq.producer.gateway.context.served_queues import ServedQueue
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.queue.call import Call


async def payloads_of(
    served: ServedQueue, caller: Caller, request_ids: Sequence[str]
) -> list[bytes]:
    """The payloads. Raises RequestNotFoundError for ids that are unknown or not the caller's."""
    queue = served.queue
    names = [queue.keys.request(request_id) for request_id in request_ids]
    records = await queue.run(
        [Call("", ["HMGET", name, "payload", "tenant"], list) for name in names]
    )
    payloads = []
    for request_id, (payload, tenant) in zip(request_ids, records, strict=True):
        is_theirs = caller.is_admin or (tenant or b"").decode() == (caller.tenant or "")
        if payload is None or not is_theirs:
            raise RequestNotFoundError(
                f"no completion {request_id[:80]!r} is known; it never was, or its record has"
                " expired"
            )
        payloads.append(payload)
    return payloads
