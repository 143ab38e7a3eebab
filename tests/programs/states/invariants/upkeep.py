"""Invariants of upkeep and control, each in words (the docstring) and in code."""

from __future__ import annotations

from collections import Counter

from promptq.shared.protocol.replies import PriorityStatus, Reaped
from tests.programs.states.calls import GRACE_MS
from tests.programs.states.invariants.states import Problems
from tests.programs.states.invariants.steps import Step, StepInvariant, all_of, sets_of


def a_purge_deletes_dead_letters(step: Step) -> Problems:
    """`purged`: the request was a dead letter, and nothing is left of it. `unknown`: it was no dead
    letter, and nothing has changed.
    """
    if step.move.kind != "purge":
        return
    (request_id,), (status,) = step.move.ids, step.outcome.answers[0]
    was_dead = step.before.state(request_id) == "dead" and request_id in step.before.dead
    if (status == "purged") != was_dead:
        yield f"{request_id} was {step.before.state(request_id) or 'absent'}; the answer: {status}"
    if status == "purged" and any(all_of(step.after, request_id)):
        yield f"{request_id} was purged; left is {all_of(step.after, request_id)}"
    if status != "purged" and step.after.snapshot != step.before.snapshot:
        yield f"{request_id} is {status}, and something has changed"


def a_change_of_priority_is_whole(step: Step) -> Problems:
    """`changed`: the request waits, and its payload was the one that was read. Payload, hash and
    score have the new priority, and nothing else has changed. With another answer, nothing has
    changed, and the answer is true. `active`: a worker holds the request. `finished`: the request
    has ended. `unknown`: the request is in no queue. `stale`: the payload is not the one that was
    read."""
    if step.move.kind != "priority":
        return
    (request_id,), (status,) = step.move.ids, step.outcome.answers
    _, priority, read, written = step.move.calls[0].args
    before, after = step.before, step.after
    is_as_read = before.fields(request_id).get("payload", "").encode() == read
    is_told_truly = {
        PriorityStatus.CHANGED: request_id in before.places and is_as_read,
        PriorityStatus.ACTIVE: request_id in before.leases,
        PriorityStatus.FINISHED: before.is_final(request_id),
        PriorityStatus.UNKNOWN: not before.is_accepted(request_id) or before.is_orphan(request_id),
        PriorityStatus.STALE: not is_as_read,
    }
    if not is_told_truly[status]:
        yield f"{request_id} was {before.state(request_id) or 'absent'}; the answer: {status}"
    expected = dict(before.fields(request_id))
    if status is PriorityStatus.CHANGED:
        score = str(step.world.by_id[request_id].arrived_ms + int(priority) * 60_000)
        expected |= {"payload": str(written), "priority": str(priority), "score": score}
    if after.fields(request_id) != expected:
        yield f"{request_id}: {status}, and {after.fields(request_id)} instead of {expected}"
    has_jumped = (request_id in before.pending) != (request_id in after.pending)
    if has_jumped or sets_of(before, request_id)[1:] != sets_of(after, request_id)[1:]:
        yield f"{request_id} stands in other sets than before"


def a_reaper_leaves_nothing_overdue(step: Step) -> Problems:
    """After a reap no lease has expired, no delay is over, and no waiting request is past its
    deadline. The answer counts the requests that were returned to the queue, ended, made dead
    letters, and deleted. A deadline may have ended some of the returned requests. Dead letters that
    were kept for their full time are deleted completely."""
    if step.move.kind != "reap":
        return
    told, expected = step.outcome.answers[0], Counter[str]()
    now_ms = step.after.now_ms
    for request_id in step.world.by_id:
        state = step.after.state(request_id)
        holds = (step.before.leases, step.before.delayed)
        was_due = any(ends.get(request_id, now_ms + 1) <= now_ms for ends in holds)
        if was_due and state in ("waiting", "expired"):
            expected["returned"] += 1
        if step.after.is_final(request_id) and not step.before.is_final(request_id):
            expected["dead" if state == "dead" else "ended"] += 1
        if step.before.is_dead_for_long(request_id):
            expected["purged"] += 1
            left = all_of(step.after, request_id)
            if any(left):
                yield f"{request_id} was kept for its time; left is {left}"
    counted = Reaped(*(expected[it] for it in ("returned", "ended", "dead", "purged")))
    if told != counted:
        yield f"the reaper tells {told} of {counted}"
    for request_id in step.world.by_id:
        if step.after.leases.get(request_id, now_ms + 1) <= now_ms:
            yield f"the lease of {request_id} has run out"
        if step.after.delayed.get(request_id, now_ms + 1) <= now_ms:
            yield f"{request_id} is delayed, though its time has come"
        if step.after.is_past_deadline(request_id) and request_id not in step.after.leases:
            yield f"{request_id} is past its deadline"


def a_sweep_lets_go_of_orphans(step: Step) -> Problems:
    """A sweep notes orphans: keys of requests that nobody holds and no set contains. If a key is
    still an orphan after an hour, its request ends, or the key is deleted. Nothing else changes.
    """
    if step.move.kind != "sweep":
        return
    if step.outcome.answers[0].cursor != "0":
        yield "the sweep did not see everything"
    now_ms = step.after.now_ms
    for request_id in step.world.by_id:
        noted = step.before.orphans.get(request_id)
        is_orphan = step.before.is_orphan(request_id)
        is_due = noted is not None and noted <= now_ms - GRACE_MS
        if not (is_orphan and is_due):
            if all_of(step.before, request_id) != all_of(step.after, request_id):
                yield f"{request_id} was {step.before.fields(request_id)} and is swept away"
        elif step.before.is_accepted(request_id):
            if not step.after.is_final(request_id):
                yield f"{request_id} has stood nowhere for long and does not end"
        elif any(all_of(step.after, request_id)):
            yield f"{request_id} is none, and left is {all_of(step.after, request_id)}"
        expected = None if is_due else now_ms if is_orphan and noted is None else noted
        if step.after.orphans.get(request_id) != expected:
            yield f"{request_id} is noted at {step.after.orphans.get(request_id)}, not {expected}"


UPKEEP_INVARIANTS: tuple[StepInvariant, ...] = (
    a_purge_deletes_dead_letters,
    a_change_of_priority_is_whole,
    a_reaper_leaves_nothing_overdue,
    a_sweep_lets_go_of_orphans,
)
