"""Invariants of every state, each in words (the docstring) and in code.

Each invariant yields a sentence for each violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from promptq.shared.protocol.events import Result, TokenEvent
from tests.programs.states.world import STRAY, View, World

Problems = Iterator[str]
StateInvariant = Callable[[World, View], Problems]


def keys_bear_the_queues_name(world: World, view: View) -> Problems:
    """Every key begins with the queue's prefix, so it is in the queue's slot of a Cluster."""
    for key in view.keys:
        if not key.startswith(view.queue.prefix):
            yield f"the key {key}"


def each_request_is_in_one_place(world: World, view: View) -> Problems:
    """An accepted request is waiting, delayed, active or final, and only one of these. The sets
    that contain its id agree with its `state`.

    Exceptions by plain clients: an id that was added to `pending` again stays there until the next
    claim. A request that was only half enqueued, or whose id was removed, is in no set.
    """
    for request_id, spec in world.by_id.items():
        if spec.plain and world.moves & STRAY and view.is_orphan(request_id):
            continue
        num_waiting = view.places.get(request_id, 0)
        is_leased, state = request_id in view.leases, view.state(request_id)
        is_final = view.is_final(request_id)
        if is_leased != (state == "active"):
            yield f"{request_id} is {state or 'absent'}, leased: {is_leased}"
        if (num_waiting > 0) != (state == "waiting") and not (spec.plain and num_waiting == 1):
            yield f"{request_id} is {state or 'absent'} and waits in {num_waiting} sets"
        if num_waiting > 1:
            yield f"{request_id} waits in {num_waiting} sets"
        if view.is_accepted(request_id) and not (is_final or is_leased or num_waiting):
            yield f"{request_id} is {state} and nowhere"


def nothing_is_held_after_the_end(world: World, view: View) -> Problems:
    """A request that has ended is in no set, except that a dead letter is in `dead`.

    If plain commands add an ended request again, its id may be in `pending` and `deadlines` until a
    script finds it.
    """
    for request_id, spec in world.by_id.items():
        if not view.is_final(request_id):
            continue
        sets = {"leases": view.leases, "delayed": view.delayed}
        if not spec.plain:
            sets |= {"pending": view.pending, "deadlines": view.deadlines}
        for name, members in sets.items():
            if request_id in members:
                yield f"{request_id} is {view.state(request_id)} and still in {name}"


def a_log_is_the_answer_so_far(world: World, view: View) -> Problems:
    """A log has the request's tokens from the first on, in order, each exactly once and unchanged.
    The id of an entry is the number of tokens up to its end. Attempt numbers never decrease. A log
    that a stranger has spoilt may contain anything.
    """
    for request_id, spec in world.by_id.items():
        if view.is_spoilt(request_id):
            continue
        count = attempt = 0
        for entry_id, json in view.log(request_id):
            event = TokenEvent.model_validate_json(json)
            if event.index != count:
                yield f"{request_id}: an event with index {event.index} behind {count} tokens"
            expected = [spec.token(index) for index in range(event.index, event.end)]
            if event.token_ids != expected or event.end > spec.num_tokens:
                yield f"{request_id}: tokens {event.token_ids} at {event.index}, not {expected}"
            if event.attempt < attempt:
                yield f"{request_id}: attempt {event.attempt} behind {attempt}"
            count, attempt = event.end, event.attempt
            if entry_id != f"{count}-{int(event.is_last)}":
                yield f"{request_id}: an event that ends at {count} is the entry {entry_id}"


def there_is_one_last_event(world: World, view: View) -> Problems:
    """A request has a last event if and only if it has ended. No entry follows this event. The
    request's hash has a copy of the event, and the event's reason agrees with the state."""
    for request_id in world.by_id:
        if view.is_spoilt(request_id):
            continue
        events = [TokenEvent.model_validate_json(event) for _, event in view.log(request_id)]
        fields, state = view.fields(request_id), view.state(request_id)
        for event in events[:-1]:
            if event.is_last:
                yield f"{request_id}: an event stands behind a last one"
        has_ended = bool(events) and events[-1].is_last
        if has_ended and not view.is_final(request_id):
            yield f"{request_id} is {state or 'absent'} and has a last event"
        if not view.is_final(request_id):
            continue
        if events and view.log(request_id)[-1][1] != fields.get("last_event"):
            yield f"{request_id}: its hash keeps another last event than its log"
        last = TokenEvent.model_validate_json(fields["last_event"])
        reason = last.finish_reason.value if last.finish_reason else ""
        if fields.get("finish_reason") != reason or state not in _STATES_AFTER.get(reason, ()):
            yield f"{request_id} is {state} after a last event of {reason!r}"


_STATES_AFTER = {
    "stop": ("completed",),
    "length": ("completed",),
    "cancelled": ("cancelled",),
    "expired": ("expired",),
    "error": ("failed", "dead"),
}


def a_result_is_the_whole_stream(world: World, view: View) -> Problems:
    """The result in the hash equals all events of the log together, and counts their tokens. If a
    stranger has spoilt the log, the result is readable and has the reason of the end.
    """
    for request_id in world.by_id:
        if not (view.is_final(request_id) and view.log(request_id)):
            continue
        if view.is_spoilt(request_id):
            result = Result.model_validate_json(view.fields(request_id)["result"])
            if result.finish_reason != view.fields(request_id)["finish_reason"]:
                yield f"{request_id} ended as {result.finish_reason} by its result"
            continue
        events = [TokenEvent.model_validate_json(event) for _, event in view.log(request_id)]
        if not events[-1].is_last:
            continue  # another invariant checks this
        result = Result.model_validate_json(view.fields(request_id)["result"])
        if result != Result.fold(events):
            yield f"{request_id}: the result {result} is not that of its log"
        if result.usage.completion_tokens != len(result.token_ids):
            yield f"{request_id}: {result.usage} for {len(result.token_ids)} tokens"


def what_has_ended_goes_and_what_lives_stays(world: World, view: View) -> Problems:
    """Hash and log of an ended request expire, except the hash of a dead letter. Hash and log of
    other requests do not expire. A dead letter is in its set until it is requeued. A request that a
    plain client cancelled before enqueueing it may expire while it waits for its end. Records of
    claims and idempotency keys expire."""
    for key in view.keys - view.expiring:
        if key.removeprefix(view.queue.prefix).partition(":")[0] in (
            "alone",
            "claimed",
            "idempotency",
        ):
            yield f"the key {key} stays"
    for request_id in world.by_id:
        if not (view.is_accepted(request_id) or view.is_final(request_id)):
            continue
        expires = view.queue.request(request_id) in view.expiring
        is_kept = request_id in view.dead
        if is_kept and view.state(request_id) != "dead":
            yield f"{request_id} is {view.state(request_id)} and a dead letter"
        is_early_cancel = (
            world.by_id[request_id].plain
            and view.state(request_id) == "waiting"
            and view.fields(request_id).get("cancelled") == "1"
        )
        if expires != (view.is_final(request_id) and not is_kept) and not is_early_cancel:
            yield f"{request_id} is {view.state(request_id)}, its hash expires: {expires}"
        if view.log(request_id):
            expires = view.queue.tokens(request_id) in view.expiring
            if expires != view.is_final(request_id):
                yield f"{request_id} is {view.state(request_id)}, its log expires: {expires}"


def a_place_in_the_queue_is_kept(world: World, view: View) -> Problems:
    """A waiting or delayed request keeps its score: the time at which it arrived, plus the part
    that the priority in its payload adds. This also holds after a worker has given the
    request back."""
    for request_id in view.pending.keys() | view.delayed.keys():
        kept, priority = view.fields(request_id).get("score"), view.priority(request_id)
        expected = world.by_id[request_id].arrived_ms + priority * 60_000
        score = view.pending.get(request_id, expected)
        if score != expected or (kept is not None and float(kept) != expected):
            yield f"{request_id} stands at {score}, its hash says {kept}, it came at {expected}"
        if view.fields(request_id).get("priority", str(priority)) != str(priority):
            yield f"{request_id}: its hash says another priority than its payload, {priority}"


def the_backlog_is_what_waits(world: World, view: View) -> Problems:
    """The backlog of each tenant equals the tokens of its waiting and delayed requests, and the
    requests of tenants are counted. The invariant does not hold where plain clients remove requests
    that were counted."""
    if world.moves & STRAY:
        return
    expected: Counter[str] = Counter()
    for request_id, spec in world.by_id.items():
        fields, tenant = view.fields(request_id), spec.tenant or ""
        if view.state(request_id) == "waiting":
            expected[f"tokens:{tenant}"] += int(fields.get("tokens", "0"))
            is_counted = tenant and "tokens" in fields and request_id not in view.delayed
            expected["waiting"] += bool(is_counted)
            expected[f"delayed:{tenant}"] += request_id in view.delayed
    if +expected != view.backlog:
        yield f"{dict(+expected)} wait, and {view.backlog} are counted"


def what_workers_hold_is_counted(world: World, view: View) -> Problems:
    """The count of each tenant's running requests is right, and within the tenant's limit."""
    expected: dict[str, set[str]] = {}
    for request_id in view.leases:
        expected.setdefault(world.by_id[request_id].tenant or "", set()).add(request_id)
    if expected != view.running:
        yield f"{expected} are held, and {view.running} are counted"
    settings = dict(zip(world.config[::2], world.config[1::2], strict=True))
    for tenant, held in expected.items():
        limit = int(settings.get(f"max_running:{tenant}", "0"))
        if 0 < limit < len(held):
            yield f"{tenant!r} has {held}, and may have {limit}"


STATE_INVARIANTS: tuple[StateInvariant, ...] = (
    keys_bear_the_queues_name,
    each_request_is_in_one_place,
    nothing_is_held_after_the_end,
    a_log_is_the_answer_so_far,
    there_is_one_last_event,
    a_result_is_the_whole_stream,
    what_has_ended_goes_and_what_lives_stays,
    a_place_in_the_queue_is_kept,
    the_backlog_is_what_waits,
    what_workers_hold_is_counted,
)
