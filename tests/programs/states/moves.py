"""The moves that are possible in a state.

The groups of moves that a world may have:

==========  ======================================================================================
produce     enqueues the request with its delay and deadline; repeats the call after a lost reply
cancel      cancels by the script (`any`): a request that waits, runs, has ended or never existed
claim       any worker claims, with room for one request or for all
publish     the holder and every earlier holder publish the next token, the token before (a retry),
            a token too far (the one before was lost), and the last token
renew       the holder and every earlier holder renew the lease
expire      a lease expires, as after a crash, a freeze or a lost connection
wait        a delay ends, that of a producer or of a script
reap        runs the upkeep that any worker may run
release     a draining worker gives a request back, with the holder's fence or an earlier one
break       a worker gives a request back after an engine failure, which counts as a crash
step        one call publishes for several requests, and several rows of one request
fail        publishes a last event with an error instead of a token
flag        a plain client cancels, before or after the enqueue
late        a plain client cancels a request that has ended
remove      cancels by the script with `waiting` and `flagged`
time        a deadline passes
tidy        the log of an ended request expires
forget      after the log, the hash expires, and the id may be used again; earlier holders then
            publish, renew and give back with their old fences
lapse       another key with an expiry expires: the id of a request that runs alone, the last claim
            of a session, an idempotency key
session     claims by a worker that reports the last reply that it got: it got all replies; it lost
            the last one and claims again; or it repeats the same call
requeue     a dead letter is enqueued again
purge       a dead letter is deleted, and the id may be used again, as with `forget`
fortnight   a dead letter becomes two weeks old
pause       the queue is paused or resumed
again       a plain client adds an id to `pending` that is there already, or that has ended
both        the script enqueues an id that plain commands may enqueue too
together    one call enqueues, cancels or releases all requests
overtaken   the server executes a claim of a session after a later one
priority    a waiting request gets another priority, from a client that read the payload as it is
            now or as it was before
half        a plain client writes a hash, but adds no id to `pending`
drop        a plain client removes an id from `pending`
lose        the hash of an id that is in no set is deleted
spoil       a stranger writes an entry that is no event into a log
sweep       runs the upkeep that removes orphaned keys
grace       an hour has passed since a sweep noted an orphan
==========  ======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator

from promptq.shared.protocol.claims import Held
from tests.programs.states import calls
from tests.programs.states.calls import FORGOTTEN, LONG_PAST, NONCE, PAST, SESSION, Move
from tests.programs.states.world import KEYS, LONG_DEAD, WORKERS, Spec, View, World

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
        "forget",
        "lapse",
        "session",
        "requeue",
        "purge",
        "fortnight",
        "again",
        "both",
        "pause",
    ),
}


def moves(world: World, view: View) -> Iterator[Move]:
    """Yields all moves of the world's groups that are possible in this state."""
    for spec in world.specs:
        for group in _GROUPS:
            yield from (move for move in group(world, view, spec) if move.kind in world.moves)
    if "claim" in world.moves:
        for number, worker in enumerate(WORKERS[: world.num_workers]):
            if number and WORKERS[0].encode() not in view.snapshot:
                break  # only the name would differ
            for budget in world.budgets:
                yield calls.claim(worker, 1, budget)
                yield calls.claim(worker, len(world.specs), budget, num_held=1)
                if len(world.specs) > 1:
                    yield calls.claim(worker, len(world.specs), budget)
    if world.moves & {"session", "overtaken"}:
        yield from _claims_in_session(world, view)
    if "reap" in world.moves:
        yield calls.reap(world.max_crashes)
    if "sweep" in world.moves:
        yield calls.sweep()
    if "pause" in world.moves:
        yield calls.pause("0" if view.is_paused else "1")
    if "lapse" in world.moves:
        yield from map(calls.lapse, view.kept_for_a_time)
    if "step" in world.moves:
        yield from _steps(world, view)
    if "together" in world.moves:
        yield from _together(world, view)


def _produce(world: World, view: View, spec: Spec) -> Iterator[Move]:
    if view.log(spec.request_id) and view.is_orphan(spec.request_id):
        return  # the id must not be used again until the log has expired
    if spec.requeue_of:
        yield calls.requeue(spec.requeue_of, spec.request_id)
    elif not spec.plain:
        yield calls.enqueue(spec, "produce")
    elif not view.is_accepted(spec.request_id):
        yield calls.enqueue_plainly(spec, "produce")
    elif spec.request_id not in view.places:
        yield calls.enqueue_plainly(spec, "again")
    if spec.plain:
        yield calls.enqueue(spec, "both")


def _reprioritise(world: World, view: View, spec: Spec) -> Iterator[Move]:
    if spec.plain and "again" in world.moves:
        return  # plain commands would restore the old payload
    for read in (None, *world.priorities):
        for priority in world.priorities:
            yield calls.reprioritise(spec, read, priority)


def _cancel(world: World, view: View, spec: Spec) -> Iterator[Move]:
    yield calls.cancel_by_script(spec.request_id, "any")
    yield calls.cancel_by_script(spec.request_id, "waiting")
    yield calls.cancel_by_script(spec.request_id, "flagged")
    is_asked_for = not spec.requeue_of or view.is_accepted(spec.request_id)
    if is_asked_for and "cancelled" not in view.fields(spec.request_id):
        yield calls.flag(spec.request_id, "late" if view.is_final(spec.request_id) else "flag")


def _publish(world: World, view: View, spec: Spec) -> Iterator[Move]:
    top, newest = view.count(spec.request_id), view.attempt(spec.request_id)
    first = 0 if world.all_positions else max(0, top - 1)
    for attempt in _attempts(world, newest):
        fence = fence_of(view, spec.request_id, attempt)
        start = first if attempt != FORGOTTEN else top
        for index in range(start, min(top + 2, spec.num_tokens)):
            is_healthy = attempt == newest == world.losses + 1 and index == top
            yield calls.publish_row(spec, attempt, fence, index, is_fair=is_healthy)
        is_healthy = attempt == newest == world.losses + 1 and view.is_spoilt(spec.request_id)
        yield calls.fail(spec, attempt, fence, top, is_fair=is_healthy)


def _hold(world: World, view: View, spec: Spec) -> Iterator[Move]:
    newest = view.attempt(spec.request_id)
    for attempt in _attempts(world, newest):
        fence = fence_of(view, spec.request_id, attempt)
        yield calls.renew(spec.request_id, attempt, fence, is_stale=attempt < newest)
        if attempt < newest or newest <= world.losses:
            yield calls.release(spec.request_id, attempt, fence)
            yield calls.release(spec.request_id, attempt, fence, world.max_crashes)


def _attempts(world: World, newest: int) -> range:
    """Returns the attempts that some worker may believe to hold."""
    may_be_forgotten = world.moves & {"forget", "purge"}
    return range(FORGOTTEN if may_be_forgotten else 1, newest + 1)


def fence_of(view: View, request_id: str, attempt: int) -> str:
    """Returns the fence that the worker of this attempt sends."""
    newest = view.attempt(request_id)
    if attempt == FORGOTTEN:  # equal to the newest fence except for the nonce
        return f"{max(1, newest)}-forgotten"
    held = view.fields(request_id).get("fence") if attempt == newest else None
    return held or f"{attempt}-{NONCE}"


def _pass_time(world: World, view: View, spec: Spec) -> Iterator[Move]:
    request_id = spec.request_id
    may_be_lost = view.attempt(request_id) <= world.losses
    if may_be_lost and view.leases.get(request_id, PAST) > PAST:
        text = "the lease of {} runs out"
        yield calls.to_the_past("expire", text, KEYS.leases, request_id, is_fair=True)
    if view.delayed.get(request_id, PAST) > PAST:
        text = "the delay of {} is over"
        yield calls.to_the_past("wait", text, KEYS.delayed, request_id, is_fair=True)
    if view.deadlines.get(request_id, PAST) > PAST:
        yield calls.to_the_past("time", "the deadline of {} passes", KEYS.deadlines, request_id)
    if view.dead.get(request_id, LONG_DEAD) > LONG_DEAD:
        text = "{} was buried two weeks ago"
        yield calls.to_the_past("fortnight", text, KEYS.dead, request_id, LONG_DEAD)


def _forget(world: World, view: View, spec: Spec) -> Iterator[Move]:
    request_id = spec.request_id
    yield calls.purge(request_id)
    if view.is_final(request_id) and view.log(request_id):
        yield calls.forget_log(request_id)
    elif KEYS.request(request_id) in view.expiring:  # a hash outlives its log
        yield calls.forget(request_id)


def _stray(world: World, view: View, spec: Spec) -> Iterator[Move]:
    request_id = spec.request_id
    goes_by_itself = KEYS.request(request_id) in view.expiring  # cancelled before it came
    if spec.plain and not goes_by_itself:
        if not view.is_accepted(request_id) and not view.log(request_id):
            yield calls.put_by_half(spec)
        if request_id in view.pending:
            yield calls.drop(request_id)
        if view.is_accepted(request_id) and view.is_orphan(request_id):
            yield calls.lose(request_id)
    if view.orphans.get(request_id, LONG_PAST) > LONG_PAST:
        text, orphans = "{} was seen to stand nowhere an hour ago", KEYS.prefix + "orphans"
        yield calls.to_the_past("grace", text, orphans, request_id, LONG_PAST, is_fair=True)


def _spoil(world: World, view: View, spec: Spec) -> Iterator[Move]:
    request_id = spec.request_id
    is_there = view.is_accepted(request_id) and not view.is_final(request_id)
    if is_there and not view.is_spoilt(request_id):
        for event in calls.NO_EVENTS:
            yield calls.spoil(request_id, view.count(request_id) + 1, event)


def _claims_in_session(world: World, view: View) -> Iterator[Move]:
    last, _ = view.claimed.get(SESSION, ("", ()))
    new = "s1" if last == "s0" else "s0"
    rooms = range(1, len(world.specs) + 1)
    if "overtaken" in world.moves:
        how = "later than the claims behind it"
        yield calls.claim_in_session(len(world.specs), "late", "", how, 1, "overtaken")
    for max_count in rooms:
        yield calls.claim_in_session(max_count, new, last, "it heard of all before", 2)
    held = view.held_by_last_claim(SESSION)
    if last and all(view.attempt(request_id) <= world.losses for request_id in held):
        for max_count in (0, *rooms):
            yield calls.claim_in_session(max_count, new, "", f"it never heard of {last}", 2)
            if max_count:
                number = view.claim_numbers[SESSION]
                yield calls.claim_in_session(max_count, last, "", "the same call once more", number)


def _steps(world: World, view: View) -> Iterator[Move]:
    """Yields calls that a worker makes after a step, or after several steps."""
    running = [(spec, view.attempt(spec.request_id)) for spec in world.specs]
    running = [(spec, attempt) for spec, attempt in running if attempt]
    for spec, attempt in running:
        top, fence = view.count(spec.request_id), fence_of(view, spec.request_id, attempt)
        indices = range(top, min(top + 2, spec.num_tokens))
        rows = [(calls.row_of(spec, fence, index), attempt) for index in indices]
        if len(rows) == 2:
            yield calls.step(rows, [(Held(spec.request_id, fence), attempt)])
    if len(running) < 2:
        return
    for stale in ((), *((spec.request_id,) for spec, attempt in running if attempt > 1)):
        rows, holders = [], []
        for spec, newest in running:
            attempt = newest - 1 if spec.request_id in stale else newest
            fence = fence_of(view, spec.request_id, attempt)
            index = min(view.count(spec.request_id), spec.num_tokens - 1)
            rows.append((calls.row_of(spec, fence, index), attempt))
            holders.append((Held(spec.request_id, fence), attempt))
        yield calls.step(rows, holders)


def _together(world: World, view: View) -> Iterator[Move]:
    """Yields calls for all requests at once."""
    yield calls.enqueue_together([it for it in world.specs if not (it.plain or it.requeue_of)])
    yield calls.cancel_together(list(world.by_id))
    attempts = [(it, view.attempt(it)) for it in world.by_id]
    held = [
        (Held(request_id, fence_of(view, request_id, attempt)), attempt)
        for request_id, attempt in attempts
        if 0 < attempt <= world.losses
    ]
    if len(held) > 1:
        yield calls.release_together(held)


_GROUPS = (
    _produce,
    _cancel,
    _reprioritise,
    _publish,
    _hold,
    _pass_time,
    _forget,
    _stray,
    _spoil,
)
"""Groups of moves of each request."""
