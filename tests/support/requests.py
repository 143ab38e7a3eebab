"""Enqueues requests for tests, and reads their logs and results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from promptq import AsyncClient, Client
from promptq.shared.protocol.claims import Claim, Held, Room
from promptq.shared.protocol.events import TokenEvent, Usage
from promptq.shared.protocol.request import (
    FinishReason,
    NewRequest,
    Request,
    RequestState,
    TokenAccount,
)
from promptq.shared.protocol.rows import Row
from promptq.shared.queue import lookups
from promptq.shared.queue.request_queue import AsyncRequestQueue, RequestQueue, new_request_id
from tests.support.waiting import until

PROMPT = "Once upon a time"
"""The prompt of a request that sets none."""

ROOM = Room(max_count=1000, token_budget=10**9)


def new(
    request_id: str = "", *, delay_ms: int = 0, account: TokenAccount | None = None, **fields: Any
) -> NewRequest:
    if "messages" not in fields:
        fields.setdefault("prompt", PROMPT)
    return NewRequest(
        request_id or new_request_id(), Request.build(fields), delay_ms, account=account
    )


def put(queue: RequestQueue, request_id: str = "", **fields: Any) -> str:
    return queue.enqueue([new(request_id, **fields)])[0]


async def async_put(queue: AsyncRequestQueue, request_id: str = "", **fields: Any) -> str:
    return (await queue.enqueue([new(request_id, **fields)]))[0]


def put_plainly(
    client: Any, queue: RequestQueue, request_id: str, score: float, payload: str
) -> None:
    """Enqueue a request with plain commands of the protocol, without a script."""
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


def entries_of(
    client: Any, queue: RequestQueue, request_id: str
) -> list[tuple[str, dict[str, Any]]]:
    """Returns (id, event) of each entry of a request's log."""
    entries = client.xrange(queue.keys.tokens(request_id))
    return [(at.decode(), json.loads(fields[b"event"])) for at, fields in entries]


def log_of(queue: RequestQueue, request_id: str) -> list[dict[str, Any]]:
    """Returns the events in a request's log."""
    return [json.loads(it) for it in queue.run(lookups.log_after(queue.keys, request_id, 0))]


async def async_log_of(queue: AsyncRequestQueue, request_id: str) -> list[dict[str, Any]]:
    events = await queue.run(lookups.log_after(queue.keys, request_id, 0))
    return [json.loads(event) for event in events]


def num_tokens(queue: RequestQueue, request_id: str) -> int:
    """Returns the number of published tokens of a request."""
    return _end_of(log_of(queue, request_id))


async def async_num_tokens(queue: AsyncRequestQueue, request_id: str) -> int:
    return _end_of(await async_log_of(queue, request_id))


async def until_tokens(queue: AsyncRequestQueue, request_id: str, count: int) -> None:
    """Waits until at least `count` tokens of a request are published."""
    while await async_num_tokens(queue, request_id) < count:
        await asyncio.sleep(0.002)


async def until_active(queue: AsyncRequestQueue, request_id: str) -> None:
    """Waits until a worker holds the request."""
    while await queue.state(request_id) is not RequestState.ACTIVE:
        await asyncio.sleep(0.002)


def _end_of(log: list[dict[str, Any]]) -> int:
    return int(log[-1]["index"]) + len(log[-1]["token_ids"]) if log else 0


def last_event(queue: RequestQueue, request_id: str) -> dict[str, Any]:
    return log_of(queue, request_id)[-1]


def result_of(queue: RequestQueue, request_id: str) -> dict[str, Any]:
    """Waits for the result of a request, and returns it."""
    text = until(lambda: queue.run(lookups.record(queue.keys, request_id)).get("result"))
    result: dict[str, Any] = json.loads(text)
    return result


def check_log(queue: RequestQueue, request_id: str, text: str) -> list[dict[str, Any]]:
    """Asserts that a finished request's log has no gap, no repeated token, one last event and this
    text. Returns the log."""
    log = log_of(queue, request_id)
    ends = [event["index"] + len(event["token_ids"]) for event in log]
    assert [event["index"] for event in log] == [0, *ends[:-1]]
    assert [bool(event["finish_reason"]) for event in log] == [False] * (len(log) - 1) + [True]
    assert "".join(event["text"] for event in log) == text
    return log


def ids(claims: list[Claim]) -> list[str]:
    return [claim.request_id for claim in claims]


KINDS = ["sync", "async"]


def read_in(
    kind: str,
    url: str,
    request_id: str,
    on_event: Callable[[TokenEvent], Any] = lambda event: None,
    **options: Any,
) -> str:
    """Returns a stream's text, read by a new client of this `kind`. Calls `on_event` with each
    event. `options` are the client's."""

    async def read() -> str:
        async with AsyncClient(url, **options) as client:
            text = ""
            async for event in client.stream(request_id):
                on_event(event)
                text += event.text
            return text

    if kind == "async":
        return asyncio.run(read())
    with Client(url, **options) as client:
        text = ""
        for event in client.stream(request_id):
            on_event(event)
            text += event.text
        return text


def enqueue_in(kind: str, url: str, **fields: Any) -> str:
    """Enqueues a request with a new client of this kind. Returns its id."""

    async def enqueue() -> str:
        async with AsyncClient(url) as client:
            return await client.enqueue("a", **fields)

    if kind == "async":
        return asyncio.run(enqueue())
    with Client(url) as client:
        return client.enqueue("a", **fields)
