"""Requests that tests of the queue put in, and what they send and read of them."""

from __future__ import annotations

import json
from typing import Any

from promptq.shared.protocol.claims import Claim, Held, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.protocol.rows import Row
from promptq.shared.queue.request_queue import RequestQueue, new_request_id

ROOM = Room(max_count=1000, token_budget=10**9)


def new(request_id: str = "", *, delay_ms: int = 0, **fields: Any) -> NewRequest:
    fields.setdefault("prompt", "hello")
    return NewRequest(request_id or new_request_id(), Request.build(fields), delay_ms)


def put(queue: RequestQueue, request_id: str = "", **fields: Any) -> str:
    return queue.enqueue([new(request_id, **fields)])[0]


def put_plainly(
    client: Any, queue: RequestQueue, request_id: str, score: float, payload: str
) -> None:
    """Enqueue with nothing but the protocol's plain commands."""
    client.hset(queue.keys.request(request_id), "payload", payload)
    client.zadd(queue.keys.pending, {request_id: score})
    client.publish(queue.keys.control, "pending")


def event(index: int, text: str = "x", reason: FinishReason | None = None) -> TokenEvent:
    tokens = [] if reason in (FinishReason.CANCELLED, FinishReason.ERROR) else [7]
    usage = Usage(prompt_tokens=3, completion_tokens=index + len(tokens)) if reason else None
    return TokenEvent(
        index=index, token_ids=tokens, text=text if tokens else "", finish_reason=reason,
        attempt=1, usage=usage,
    )  # fmt: skip


def row(claim: Claim, index: int, text: str = "x", reason: FinishReason | None = None) -> Row:
    return Row.of(claim.request_id, claim.fence, event(index, text, reason))


def held(claim: Claim) -> Held:
    return Held(claim.request_id, claim.fence)


def log_of(client: Any, queue: RequestQueue, request_id: str) -> list[tuple[str, dict[str, Any]]]:
    entries = client.xrange(queue.keys.tokens(request_id))
    return [(at.decode(), json.loads(fields[b"event"])) for at, fields in entries]


def last_event(client: Any, queue: RequestQueue, request_id: str) -> dict[str, Any]:
    return log_of(client, queue, request_id)[-1][1]


def ids(claims: list[Claim]) -> list[str]:
    return [claim.request_id for claim in claims]
