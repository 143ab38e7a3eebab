"""What may happen in a state: moves, each one or more calls as clients and workers build them.

The groups that a world may have:

==========  ======================================================================================
produce     enqueue, with delay and deadline as the request has them; again, as after a lost reply
cancel      the script's `any`; of what waits, runs, has ended or was never there
claim       by any worker, with room for one or for all
publish     the next token, the one before (a retry), one too far (its predecessor was lost), the
            last; by the holder and by every earlier one
renew       by the holder and by every earlier one
expire      a lease runs out, which a crash, a freeze or a lost connection leads to
wait        a delay is over, the producer's or one that a script gave
reap        the upkeep that any worker does
release     a drain gives back, with the holder's fence or an earlier one
break       the same because the engine failed, which counts as a crash
step        one call for several requests, and with several rows of one request
fail        a last event with an error instead of a token
flag        a plain client's cancel, before or after the enqueue
late        the same of what has ended
remove      the cancels `waiting` and `flagged`
time        a deadline passes
tidy        the log of what has ended expires
requeue     a dead letter is run again
pause       the queue hands out nothing; or goes on
again       a plain client puts an id into `pending` that is there already, or has ended
==========  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from shared import scripts
from shared.schemas import ErrorInfo, FinishReason, Request, TokenEvent, Usage
from shared.scripts import Call, Held, ModelIdentity, NewRequest, Room, Row
from tests.shared.states.world import AMPLE, KEYS, NOW_MS, WORKERS, Spec, View, World

REQUIRED = frozenset({"produce", "cancel", "claim", "publish", "renew", "expire", "wait", "reap"})
ALL = REQUIRED | {
    *(
        "release",
        "break",
        "step",
        "fail",
        "flag",
        "late",
        "remove",
        "time",
        "tidy",
        "requeue",
        "again",
        "pause",
    ),
}

LEASE_MS = 3_600_000
PAST = NOW_MS - 1


@dataclass(frozen=True)
class Move:
    """Something that happens. `text` tells of it in a trace; `ids` are the requests it is about."""

    kind: str
    text: str
    calls: tuple[Call[Any], ...]
    ids: tuple[str, ...]
    rows: tuple[tuple[Row, int], ...] = ()
    """The rows it publishes, each with the attempt that makes it."""
    holders: tuple[tuple[str, int], ...] = ()
    """Request and attempt of each fence that it shows without a row."""
    is_fair: bool = False
    """Whether it needs no luck: it is tried again and again as long as somebody serves the queue,
    even if all that hold anything are gone."""


def moves(world: World, view: View) -> Iterator[Move]:
    """All that may happen in this state."""
    for spec in world.specs:
        for group in (_produce, _cancel, _publish, _hold, _pass_time):
            yield from (move for move in group(world, view, spec) if move.kind in world.moves)
    if "claim" in world.moves:
        for number, worker in enumerate(WORKERS[: world.num_workers]):
            if number and WORKERS[0].encode() not in view.snapshot:
                break  # it would only be the other's name
            for budget in world.budgets:
                yield _claim(worker, 1, budget)
                yield _claim(worker, len(world.specs), budget, num_held=1)
                if len(world.specs) > 1:
                    yield _claim(worker, len(world.specs), budget)
    if "reap" in world.moves:
        yield _reap(world.max_crashes)
    if "pause" in world.moves:
        yield _pause("0" if view.is_paused else "1")
    if "step" in world.moves:
        yield from _steps(world, view)


def _produce(world: World, view: View, spec: Spec) -> Iterator[Move]:
    if spec.requeue_of:
        yield _requeue(spec.requeue_of, spec.request_id)
    elif not spec.plain:
        yield _enqueue(spec)
    elif not view.is_accepted(spec.request_id):
        yield _enqueue_plainly(spec, "produce")
    elif spec.request_id not in view.pending:
        yield _enqueue_plainly(spec, "again")


def _cancel(world: World, view: View, spec: Spec) -> Iterator[Move]:
    yield _cancel_by_script(spec.request_id, "any")
    yield _cancel_by_script(spec.request_id, "waiting")
    yield _cancel_by_script(spec.request_id, "flagged")
    is_asked_for = not spec.requeue_of or view.is_accepted(spec.request_id)
    if is_asked_for and "cancelled" not in view.fields(spec.request_id):
        yield _flag(spec.request_id, "late" if view.is_final(spec.request_id) else "flag")


def _publish(world: World, view: View, spec: Spec) -> Iterator[Move]:
    top, newest = view.count(spec.request_id), view.attempt(spec.request_id)
    first = 0 if world.all_positions else max(0, top - 1)
    for attempt in range(1, newest + 1):
        for index in range(first, min(top + 2, spec.num_tokens)):
            is_healthy = attempt == newest == world.losses + 1 and index == top
            yield _publish_row(spec, attempt, index, is_fair=is_healthy)
        yield _fail(spec, attempt, top)


def _hold(world: World, view: View, spec: Spec) -> Iterator[Move]:
    newest = view.attempt(spec.request_id)
    for attempt in range(1, newest + 1):
        yield _renew(spec.request_id, attempt)
        if attempt < newest or newest <= world.losses:
            yield _release(spec.request_id, attempt)
            yield _release(spec.request_id, attempt, world.max_crashes)


def _pass_time(world: World, view: View, spec: Spec) -> Iterator[Move]:
    request_id = spec.request_id
    may_be_lost = view.attempt(request_id) <= world.losses
    if may_be_lost and view.leases.get(request_id, PAST) > PAST:
        yield _to_the_past("expire", "the lease of {} runs out", KEYS.leases, request_id, True)
    if view.delayed.get(request_id, PAST) > PAST:
        yield _to_the_past("wait", "the delay of {} is over", KEYS.delayed, request_id, True)
    if view.deadlines.get(request_id, PAST) > PAST:
        yield _to_the_past("time", "the deadline of {} passes", KEYS.deadlines, request_id)
    if view.is_final(request_id) and view.log(request_id):
        yield _forget_log(request_id)


def _steps(world: World, view: View) -> Iterator[Move]:
    """Calls as a worker makes them after a step, or after several that came meanwhile."""
    running = [(spec, view.attempt(spec.request_id)) for spec in world.specs]
    running = [(spec, attempt) for spec, attempt in running if attempt]
    for spec, attempt in running:
        top = view.count(spec.request_id)
        rows = [_row(spec, attempt, index) for index in range(top, min(top + 2, spec.num_tokens))]
        if len(rows) == 2:
            yield _step([(row, attempt) for row in rows], [(spec.request_id, attempt)])
    if len(running) < 2:
        return
    for stale in ((), *((spec.request_id,) for spec, attempt in running if attempt > 1)):
        rows_of_all, holders = [], []
        for spec, newest in running:
            attempt = newest - 1 if spec.request_id in stale else newest
            index = min(view.count(spec.request_id), spec.num_tokens - 1)
            rows_of_all.append((_row(spec, attempt, index), attempt))
            holders.append((spec.request_id, attempt))
        yield _step(rows_of_all, holders)


def fence_of(attempt: int) -> str:
    """What a claim hands out, as every call of the world brings the same nonce."""
    return f"{attempt}-n"


@cache
def _enqueue(spec: Spec) -> Move:
    new = [NewRequest(spec.request_id, request_of(spec), spec.delay_ms)]
    call = scripts.enqueue(new, LEASE_MS, nonce=f"call-{spec.request_id}")
    return Move("produce", f"enqueue {spec.request_id}", (call,), (spec.request_id,))


@cache
def _enqueue_plainly(spec: Spec, kind: str) -> Move:
    request_id, payload = spec.request_id, request_of(spec).to_payload()
    score = NOW_MS + spec.priority * 60_000
    calls = (
        _plain("HSET", KEYS.request(request_id), "payload", payload),
        _plain("ZADD", KEYS.pending, score, request_id),
        _plain("PUBLISH", KEYS.control, "pending"),
    )
    return Move(kind, f"put {request_id} in by plain commands", calls, (request_id,))


def request_of(spec: Spec) -> Request:
    fields: dict[str, Any] = {"prompt": "p", "max_tokens": spec.num_tokens}
    fields |= {"priority": spec.priority, "deadline_ms": spec.deadline_ms or None}
    fields |= {"tenant": spec.tenant, "idempotency_key": spec.idempotency_key}
    return Request.build(fields)


@cache
def _requeue(dead_id: str, new_id: str) -> Move:
    call = scripts.requeue(dead_id, new_id)
    return Move("requeue", f"requeue {dead_id} as {new_id}", (call,), (dead_id, new_id))


@cache
def _cancel_by_script(request_id: str, mode: scripts.CancelMode) -> Move:
    kind = "cancel" if mode == "any" else "remove"
    call = scripts.cancel([request_id], mode)
    return Move(kind, f"cancel {request_id} ({mode})", (call,), (request_id,))


@cache
def _flag(request_id: str, kind: str) -> Move:
    call = _plain("HSET", KEYS.request(request_id), "cancelled", "1")
    return Move(kind, f"flag {request_id} as cancelled", (call,), (request_id,))


@cache
def _claim(worker: str, max_count: int, budget: int, num_held: int = 0) -> Move:
    room = Room(max_count=max_count, token_budget=budget, num_held=num_held)
    call = scripts.claim(worker, LEASE_MS, room, "n", "seeds", ModelIdentity())
    text = f"{worker}, which holds {num_held}, claims up to {max_count} in {budget} tokens"
    return Move("claim", text, (call,), (), is_fair=budget == AMPLE and not num_held)


@cache
def _row(spec: Spec, attempt: int, index: int) -> Row:
    is_last = index == spec.num_tokens - 1
    usage = Usage(prompt_tokens=1, completion_tokens=index + 1) if is_last else None
    event = TokenEvent(
        index=index,
        token_ids=[spec.token(index)],
        text=f"{spec.token(index)} ",
        finish_reason=FinishReason.LENGTH if is_last else None,
        attempt=attempt,
        usage=usage,
    )
    return Row.of(spec.request_id, fence_of(attempt), event)


@cache
def _publish_row(spec: Spec, attempt: int, index: int, is_fair: bool) -> Move:
    row = _row(spec, attempt, index)
    what = "the last token" if row.finish_reason else f"token {index}"
    text = f"attempt {attempt} publishes {what} of {spec.request_id}"
    call = scripts.publish(LEASE_MS, [row], [])
    rows = ((row, attempt),)
    return Move("publish", text, (call,), (spec.request_id,), rows, is_fair=is_fair)


@cache
def _fail(spec: Spec, attempt: int, index: int) -> Move:
    event = TokenEvent(
        index=index,
        token_ids=[],
        text="",
        finish_reason=FinishReason.ERROR,
        attempt=attempt,
        usage=Usage(prompt_tokens=1, completion_tokens=index),
        error=ErrorInfo(type="internal_error", message="the engine failed it"),
    )
    row = Row.of(spec.request_id, fence_of(attempt), event)
    text = f"attempt {attempt} ends {spec.request_id} with an error behind {index} tokens"
    call = scripts.publish(LEASE_MS, [row], [])
    return Move("fail", text, (call,), (spec.request_id,), ((row, attempt),))


def _step(rows: list[tuple[Row, int]], holders: list[tuple[str, int]]) -> Move:
    parts = [f"attempt {attempt} token {row.start} of {row.request_id}" for row, attempt in rows]
    held = [Held(request_id, fence_of(attempt)) for request_id, attempt in holders]
    call = scripts.publish(LEASE_MS, [row for row, _ in rows], held)
    ids = tuple(dict.fromkeys(request_id for request_id, _ in holders))
    return Move("step", "one call: " + ", ".join(parts), (call,), ids, tuple(rows), tuple(holders))


@cache
def _renew(request_id: str, attempt: int) -> Move:
    call = scripts.publish(LEASE_MS, [], [Held(request_id, fence_of(attempt))])
    text = f"attempt {attempt} renews {request_id}"
    return Move("renew", text, (call,), (request_id,), holders=((request_id, attempt),))


@cache
def _release(request_id: str, attempt: int, max_crashes: int | None = None) -> Move:
    call = scripts.release([Held(request_id, fence_of(attempt))], max_crashes)
    how = "releases" if max_crashes is None else "gives back after its engine failed"
    text = f"attempt {attempt} {how} {request_id}"
    return Move(
        "release" if max_crashes is None else "break",
        text,
        (call,),
        (request_id,),
        holders=((request_id, attempt),),
    )


@cache
def _reap(max_crashes: int) -> Move:
    return Move("reap", "somebody reaps", (scripts.reap(max_crashes),), (), is_fair=True)


@cache
def _pause(paused: str) -> Move:
    call = _plain("HSET", KEYS.config, "paused", paused)
    text = "somebody pauses the queue" if paused == "1" else "somebody lets the queue go on"
    return Move("pause", text, (call,), (), is_fair=paused == "0")


@cache
def _to_the_past(kind: str, text: str, key: str, request_id: str, is_fair: bool = False) -> Move:
    call = _plain("ZADD", key, "XX", PAST, request_id)
    return Move(kind, text.format(request_id), (call,), (request_id,), is_fair=is_fair)


@cache
def _forget_log(request_id: str) -> Move:
    call = _plain("DEL", KEYS.tokens(request_id))
    return Move("tidy", f"the log of {request_id} expires", (call,), (request_id,))


def _plain(*args: str | bytes | int) -> Call[Any]:
    return Call("", list(args), lambda reply: reply)
