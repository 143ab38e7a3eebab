"""Moves of the exploration. A move has one or more calls, built as clients and workers build
them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from promptq.shared.protocol.claims import ClaimContext, Held, ModelIdentity, Room
from promptq.shared.protocol.events import ErrorInfo, Result, TokenEvent, Usage
from promptq.shared.protocol.replies import CancelMode
from promptq.shared.protocol.request import FinishReason, NewRequest, Request
from promptq.shared.protocol.rows import Row
from promptq.shared.queue import scripts
from promptq.shared.queue.call import Call
from tests.programs.states.world import AMPLE, KEYS, NOW_MS, Spec

LEASE_MS = 3_600_000
PAST = NOW_MS - 1
GRACE_MS = 3_600_000
"""The time after which a sweep removes an orphan, by default."""
LONG_PAST = PAST - GRACE_MS
NONCE = "n"
"""The nonce of all claims without a session, so that fences of a request differ by the attempt
alone."""
SESSION, NO_SESSION = "s", ClaimContext()

PROMPT_TOKENS = 1
"""The length of the prompt that zombies report, and workers that give a request back."""

FORGOTTEN = 0
"""Stands for the attempts at an earlier request of the same id, whose data is gone."""


@dataclass(frozen=True)
class Move:
    """One event in a world. `text` describes the move in a trace; `ids` are its requests."""

    kind: str
    text: str
    calls: tuple[Call[Any], ...]
    ids: tuple[str, ...]
    rows: tuple[tuple[Row, int], ...] = ()
    """The rows that the move publishes, each with its attempt."""
    holders: tuple[tuple[str, int], ...] = ()
    """(request, attempt) of each fence that the move sends without a row."""
    is_fair: bool = False
    """Whether the move certainly happens at some time, because workers repeat it as long as any of
    them serves the queue, even if all current holders are gone."""
    nonce: str = NONCE
    """The part of fences that a claim chooses."""
    context: ClaimContext = NO_SESSION
    """The claim's report of the claims before it."""


@cache
def enqueue(spec: Spec, kind: str) -> Move:
    new = [NewRequest(spec.request_id, request_of(spec), spec.delay_ms)]
    call = scripts.enqueue(new, LEASE_MS, nonce=f"call-{spec.request_id}")
    return Move(kind, f"enqueue {spec.request_id}", (call,), (spec.request_id,))


def enqueue_together(specs: list[Spec]) -> Move:
    new = [NewRequest(spec.request_id, request_of(spec), spec.delay_ms) for spec in specs]
    call = scripts.enqueue(new, LEASE_MS, nonce="call-of-all")
    ids = tuple(spec.request_id for spec in specs)
    return Move("together", "one call: enqueue " + ", ".join(ids), (call,), ids)


def cancel_together(request_ids: list[str]) -> Move:
    text = "one call: cancel " + ", ".join(request_ids)
    return Move("together", text, (scripts.cancel(request_ids),), tuple(request_ids))


def release_together(held: list[tuple[Held, int]]) -> Move:
    parts = [f"attempt {attempt} of {it.request_id}" for it, attempt in held]
    call = scripts.release([it for it, _ in held])
    holders = tuple((it.request_id, attempt) for it, attempt in held)
    ids = tuple(request_id for request_id, _ in holders)
    return Move("together", "one call: release " + ", ".join(parts), (call,), ids, holders=holders)


@cache
def enqueue_plainly(spec: Spec, kind: str) -> Move:
    request_id, payload = spec.request_id, request_of(spec).to_payload()
    score = NOW_MS + spec.priority * 60_000
    calls = [
        plain("HSET", KEYS.request(request_id), "payload", payload),
        plain("ZADD", KEYS.pending, score, request_id),
        plain("PUBLISH", KEYS.control, "pending"),
    ]
    if spec.deadline_ms:
        calls.insert(2, plain("ZADD", KEYS.deadlines, NOW_MS + spec.deadline_ms, request_id))
    return Move(kind, f"put {request_id} in by plain commands", tuple(calls), (request_id,))


@cache
def put_by_half(spec: Spec) -> Move:
    payload = request_of(spec).to_payload()
    call = plain("HSET", KEYS.request(spec.request_id), "payload", payload)
    text = f"put only the hash of {spec.request_id} in"
    return Move("half", text, (call,), (spec.request_id,))


@cache
def drop(request_id: str) -> Move:
    call = plain("ZREM", KEYS.pending, request_id)
    return Move("drop", f"take {request_id} out of `pending`", (call,), (request_id,))


@cache
def lose(request_id: str) -> Move:
    call = plain("DEL", KEYS.request(request_id))
    return Move("lose", f"delete the hash of {request_id}", (call,), (request_id,))


NO_EVENTS = (
    '{"index":0,"token_ids":["y"],"text":"","logprobs":null,"finish_reason":null,"attempt":1}',
    '{"index":0,"token_ids":[7],"text":null,"logprobs":null,"finish_reason":null,"attempt":1}',
    '{"index":0,"token_ids":[7],"text":"","logprobs":[{"logprob":1e999}],"finish_reason":null,"attempt":1}',
    '{"index":0,"token_ids":{"a":1.5},"text":"","usage":[[1e999]],"error":{"type":[]}}',
    "[" * 2000,
)
"""Entries of a log that a stranger may have written, and that are no events."""


@cache
def spoil(request_id: str, count: int, event: str) -> Move:
    call = plain("XADD", KEYS.tokens(request_id), f"{count}-0", "event", event)
    text = f"a stranger writes {event[:60]} into the log of {request_id}"
    return Move("spoil", text, (call,), (request_id,))


@cache
def sweep() -> Move:
    return Move("sweep", "somebody sweeps", (scripts.sweep(limit=1000),), (), is_fair=True)


def request_of(spec: Spec) -> Request:
    fields: dict[str, Any] = {"prompt": "p", "max_tokens": spec.num_tokens}
    fields |= {"priority": spec.priority, "deadline_ms": spec.deadline_ms or None}
    fields |= {"tenant": spec.tenant, "idempotency_key": spec.idempotency_key}
    return Request.build(fields)


@cache
def requeue(dead_id: str, new_id: str) -> Move:
    call = scripts.requeue(dead_id, new_id)
    return Move("requeue", f"requeue {dead_id} as {new_id}", (call,), (dead_id, new_id))


@cache
def purge(request_id: str) -> Move:
    call = scripts.purge([request_id])
    return Move("purge", f"purge {request_id}", (call,), (request_id,))


@cache
def reprioritise(spec: Spec, read: int | None, priority: int) -> Move:
    """Returns a move that changes a priority. The client read the payload when it had the priority
    `read`; None stands for the payload that was enqueued."""
    old = request_of(spec).to_payload() if read is None else _payload_with(spec, read)
    new = _payload_with(spec, priority)
    call = scripts.reprioritise(spec.request_id, priority, old.encode(), new)
    who = "of its first" if read is None else f"of {read}"
    text = f"{spec.request_id} gets priority {priority} instead {who}"
    return Move("priority", text, (call,), (spec.request_id,))


def _payload_with(spec: Spec, priority: int) -> str:
    return json.dumps({**json.loads(request_of(spec).to_payload()), "priority": priority})


@cache
def cancel_by_script(request_id: str, mode: CancelMode) -> Move:
    kind = "cancel" if mode == "any" else "remove"
    call = scripts.cancel([request_id], mode)
    return Move(kind, f"cancel {request_id} ({mode})", (call,), (request_id,))


@cache
def flag(request_id: str, kind: str) -> Move:
    call = plain("HSET", KEYS.request(request_id), "cancelled", "1")
    return Move(kind, f"flag {request_id} as cancelled", (call,), (request_id,))


@cache
def claim(worker: str, max_count: int, budget: int, num_held: int = 0) -> Move:
    room = Room(max_count=max_count, token_budget=budget, num_held=num_held)
    call = scripts.claim(worker, LEASE_MS, room, NONCE, "seeds", ModelIdentity(), ClaimContext())
    text = f"{worker}, which holds {num_held}, claims up to {max_count} in {budget} tokens"
    return Move("claim", text, (call,), (), is_fair=budget == AMPLE and not num_held)


@cache
def claim_in_session(
    max_count: int, nonce: str, answered: str, how: str, number: int, kind: str = "session"
) -> Move:
    room, context = Room(max_count, AMPLE), ClaimContext(SESSION, answered, number=number)
    call = scripts.claim("worker-s", LEASE_MS, room, nonce, "seeds", ModelIdentity(), context)
    text = f"worker-s claims up to {max_count} by {nonce}; {how}"
    return Move(kind, text, (call,), (), nonce=nonce, context=context)


@cache
def row_of(spec: Spec, fence: str, index: int) -> Row:
    is_last = index == spec.num_tokens - 1
    usage = Usage(prompt_tokens=1, completion_tokens=index + 1) if is_last else None
    event = TokenEvent(
        index=index,
        token_ids=[spec.token(index)],
        text=f"{spec.token(index)} ",
        finish_reason=FinishReason.LENGTH if is_last else None,
        attempt=_attempt_in(fence),
        usage=usage,
    )
    return Row.of(spec.request_id, fence, event, _result_of(spec, event) if is_last else "")


def _result_of(spec: Spec, last: TokenEvent) -> str:
    """Returns the result that workers send with the last token."""
    token_ids = [spec.token(index) for index in range(spec.num_tokens)]
    text = "".join(f"{token_id} " for token_id in token_ids)
    whole = last.model_copy(update={"index": 0, "token_ids": token_ids, "text": text})
    return Result.fold([whole]).to_json()


@cache
def publish_row(spec: Spec, attempt: int, fence: str, index: int, is_fair: bool) -> Move:
    row = row_of(spec, fence, index)
    what = "the last token" if row.finish_reason else f"token {index}"
    text = f"{_name(attempt)} publishes {what} of {spec.request_id}"
    call = scripts.publish(LEASE_MS, [row], [])
    rows = ((row, attempt),)
    return Move("publish", text, (call,), (spec.request_id,), rows, is_fair=is_fair)


@cache
def fail(spec: Spec, attempt: int, fence: str, index: int, is_fair: bool) -> Move:
    event = TokenEvent(
        index=index,
        token_ids=[],
        text="",
        finish_reason=FinishReason.ERROR,
        attempt=_attempt_in(fence),
        usage=Usage(prompt_tokens=1, completion_tokens=index),
        error=ErrorInfo(type="internal_error", message="the engine failed it"),
    )
    row = Row.of(spec.request_id, fence, event)
    text = f"{_name(attempt)} ends {spec.request_id} with an error behind {index} tokens"
    call = scripts.publish(LEASE_MS, [row], [])
    rows = ((row, attempt),)
    return Move("fail", text, (call,), (spec.request_id,), rows, is_fair=is_fair)


def step(rows: list[tuple[Row, int]], holders: list[tuple[Held, int]]) -> Move:
    parts = [f"attempt {attempt} token {row.start} of {row.request_id}" for row, attempt in rows]
    call = scripts.publish(LEASE_MS, [row for row, _ in rows], [held for held, _ in holders])
    attempts = tuple((held.request_id, attempt) for held, attempt in holders)
    ids = tuple(dict.fromkeys(request_id for request_id, _ in attempts))
    return Move("step", "one call: " + ", ".join(parts), (call,), ids, tuple(rows), attempts)


@cache
def renew(request_id: str, attempt: int, fence: str, is_stale: bool) -> Move:
    prompt_tokens = PROMPT_TOKENS if is_stale else None  # which must not be written
    call = scripts.publish(LEASE_MS, [], [Held(request_id, fence, prompt_tokens)])
    text = f"{_name(attempt)} renews {request_id}"
    return Move("renew", text, (call,), (request_id,), holders=((request_id, attempt),))


@cache
def release(request_id: str, attempt: int, fence: str, max_crashes: int | None = None) -> Move:
    call = scripts.release([Held(request_id, fence, PROMPT_TOKENS)], max_crashes)
    how = "releases" if max_crashes is None else "gives back after its engine failed"
    text = f"{_name(attempt)} {how} {request_id}"
    return Move(
        "release" if max_crashes is None else "break",
        text,
        (call,),
        (request_id,),
        holders=((request_id, attempt),),
    )


@cache
def reap(max_crashes: int) -> Move:
    return Move("reap", "somebody reaps", (scripts.reap(max_crashes),), (), is_fair=True)


@cache
def pause(paused: str) -> Move:
    call = plain("HSET", KEYS.config, "paused", paused)
    text = "somebody pauses the queue" if paused == "1" else "somebody lets the queue go on"
    return Move("pause", text, (call,), (), is_fair=paused == "0")


@cache
def to_the_past(
    kind: str, text: str, key: str, request_id: str, at: int = PAST, is_fair: bool = False
) -> Move:
    call = plain("ZADD", key, "XX", at, request_id)
    return Move(kind, text.format(request_id), (call,), (request_id,), is_fair=is_fair)


@cache
def forget_log(request_id: str) -> Move:
    call = plain("DEL", KEYS.tokens(request_id))
    return Move("tidy", f"the log of {request_id} expires", (call,), (request_id,))


@cache
def forget(request_id: str) -> Move:
    """Returns a move in which a request's hash expires. The move also deletes the recorded lengths
    of outputs, because each request of this id would add one more length."""
    calls = (plain("DEL", KEYS.request(request_id)), plain("DEL", KEYS.prefix + "outputs"))
    return Move("forget", f"the hash of {request_id} expires", calls, (request_id,))


@cache
def lapse(key: str) -> Move:
    return Move("lapse", f"the key {key} expires", (plain("DEL", key),), ())


def plain(*args: str | bytes | int) -> Call[Any]:
    return Call("", list(args), lambda reply: reply)


def _name(attempt: int) -> str:
    return "a forgotten attempt" if attempt == FORGOTTEN else f"attempt {attempt}"


def _attempt_in(fence: str) -> int:
    return int(fence.split("-")[0])
