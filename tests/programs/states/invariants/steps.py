"""Invariants of every move, each in words (the docstring) and in code.

Each invariant yields a sentence for each violation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hiredis

from promptq.shared.errors import PromptqError
from promptq.shared.protocol.claims import Claims
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.replies import CancelStatus
from promptq.shared.protocol.rows import Published, RowStatus
from tests.programs.states.calls import Move
from tests.programs.states.invariants.states import Problems
from tests.programs.states.server import Outcome
from tests.programs.states.world import View, World


@dataclass(frozen=True)
class Step:
    """A move, with the states before and after it."""

    world: World
    before: View
    move: Move
    outcome: Outcome
    after: View

    def appended(self, request_id: str) -> list[TokenEvent]:
        """Returns the entries that the move added to a request's log."""
        if self.after is self.before or self.move.kind == "spoil":
            return []
        new = self.after.log(request_id)[len(self.before.log(request_id)) :]
        return [TokenEvent.model_validate_json(event) for _, event in new]

    @property
    def published(self) -> Published | None:
        answer = self.outcome.answers[0]
        return answer if isinstance(answer, Published) else None

    @property
    def claims(self) -> Claims:
        answer = self.outcome.answers[0]
        return answer if isinstance(answer, Claims) else Claims()


StepInvariant = Callable[[Step], Problems]


def scripts_raise_no_errors(step: Step) -> Problems:
    """No script ends with an error, and the server refuses no row."""
    for answer in step.outcome.answers:
        if isinstance(answer, hiredis.ReplyError):
            yield f"the server says: {answer}"
    if step.published is not None and RowStatus.ERROR in step.published.rows:
        yield "the server refuses a row"


def what_has_ended_never_changes(step: Step) -> Problems:
    """State, last event, result and log of a request do not change after its end. The log may
    expire, and later the whole request. A purge may delete a dead letter, and a reaper may delete a
    dead letter that was kept for its full time."""
    for request_id in step.world.by_id:
        if not step.before.is_final(request_id):
            continue
        kind = step.move.kind
        if (
            kind == "forget"
            or (kind == "purge" and step.before.state(request_id) == "dead")
            or (kind == "reap" and step.before.is_dead_for_long(request_id))
        ):
            continue
        old, new = step.before.fields(request_id), step.after.fields(request_id)
        for field in ("state", "finish_reason", "finished_at", "last_event", "result", "attempt"):
            if old.get(field) != new.get(field):
                yield f"{request_id}: {field} was {old.get(field)} and is {new.get(field)}"
        if step.after.log(request_id) not in (step.before.log(request_id), ()):
            yield f"{request_id}: its log changed after its end"


def a_log_only_grows(step: Step) -> Problems:
    """No entry of a log is changed or removed while the request exists. A sweep may delete a log
    whose hash was deleted.
    """
    for request_id in step.world.by_id:
        if step.move.kind == "sweep" and not step.before.is_accepted(request_id):
            continue
        old, new = step.before.log(request_id), step.after.log(request_id)
        if not step.before.is_final(request_id) and new[: len(old)] != old:
            yield f"{request_id}: its log was {old} and is {new}"


def subscribers_hear_what_the_log_gets(step: Step) -> Problems:
    """A request's channel gets the new entries of its log, byte for byte and in order. After the
    request has ended, the channel may get the last event again."""
    if step.move.kind == "spoil":
        return
    for request_id in step.world.by_id:
        heard = [
            text for at, text in step.outcome.heard if at == step.after.queue.events(request_id)
        ]
        old, new = step.before.log(request_id), step.after.log(request_id)
        appended = [event for _, event in new[len(old) :]]
        last = step.before.fields(request_id).get("last_event")
        if heard != appended and not (heard == [last] and not appended):
            yield f"{request_id}: the log got {appended}, subscribers heard {heard}"


def only_the_newest_attempt_writes(step: Step) -> Problems:
    """Only the newest attempt, while it holds the request, can write rows, renew the lease or give
    the request back. Calls of other attempts change nothing.
    """
    senders = {row.request_id: attempt for row, attempt in step.move.rows} | dict(step.move.holders)
    for request_id, attempt in senders.items():
        if _holds(step.before, request_id, attempt):
            continue
        if all_of(step.before, request_id) != all_of(step.after, request_id):
            yield f"attempt {attempt} changed {request_id}, which it does not hold"


def who_lost_a_request_learns_it(step: Step) -> Problems:
    """If a worker sends a row or a fence for a request that it no longer holds, the answer is
    `fenced`, or `finished` if the request has ended."""
    published = step.published
    if published is None:
        return
    rows = [(row.request_id, attempt) for row, attempt in step.move.rows]
    sent = [*zip(rows, published.rows, strict=True)]
    sent += zip(step.move.holders, published.held, strict=True)
    for (request_id, attempt), status in sent:
        if _holds(step.before, request_id, attempt):
            if status is RowStatus.FENCED:
                yield f"attempt {attempt} holds {request_id} and is fenced off"
        elif status not in (RowStatus.FENCED, RowStatus.FINISHED):
            yield f"attempt {attempt} lost {request_id} and is told {status}"


def an_answer_to_a_row_is_true(step: Step) -> Problems:
    """`ok`: the row is in the log now. `duplicate`: the row was in the log before, with the same
    tokens. `gap`: the log ends before the row. `cancelled`, `expired`, `finished`: the request has
    ended.
    """
    published = step.published
    if published is None:
        return
    for (row, _), status in zip(step.move.rows, published.rows, strict=True):
        old, new = step.before.log(row.request_id), step.after.log(row.request_id)
        is_written = (f"{row.end}-{int(bool(row.finish_reason))}", row.event_json) in new[
            len(old) :
        ]
        if (status is RowStatus.OK) != is_written:
            yield f"{row.request_id}: {status} for a row that is written: {is_written}"
        elif status is RowStatus.DUPLICATE and step.before.count(row.request_id) < row.end:
            yield f"{row.request_id}: duplicate for a token that was not there"
        elif status is RowStatus.GAP and step.before.count(row.request_id) >= row.start:
            yield f"{row.request_id}: gap without a gap"
        says_ended = status in (RowStatus.CANCELLED, RowStatus.EXPIRED, RowStatus.FINISHED)
        if says_ended and not step.after.is_final(row.request_id):
            yield f"{row.request_id}: {status}, but it has not ended"


def nothing_follows_a_cancel_but_the_end(step: Step) -> Problems:
    """Once a request is flagged as cancelled, or is past its deadline, none of its tokens is
    published. The next row or renewal by its holder ends the request.
    """
    for request_id in step.world.by_id:
        is_cancelled = step.before.fields(request_id).get("cancelled") == "1"
        if not is_cancelled and not step.before.is_past_deadline(request_id):
            continue
        for event in step.appended(request_id):
            if event.token_ids or not event.is_last:
                yield f"{request_id} was to end and got the tokens {event.token_ids}"
        senders = {(row.request_id, attempt) for row, attempt in step.move.rows}
        for _, attempt in [it for it in senders | set(step.move.holders) if it[0] == request_id]:
            is_held = _holds(step.before, request_id, attempt)
            is_given_back = step.move.calls[0].script == "release" and not is_cancelled
            if is_held and not step.after.is_final(request_id) and not is_given_back:
                yield f"{request_id} was to end and goes on"


def an_answer_to_a_producer_is_true(step: Step) -> Problems:
    """`ok` to an enqueue or requeue: the request is in the queue, without data of an earlier
    request. A refusal: nothing has changed, for all requests of the call. An id that was accepted
    before (this id, or the id of the same idempotency key): that request has not changed. A cancel:
    the request has ended, now or before, or the request's worker will see the flag."""
    answer, script = step.outcome.answers[0], step.move.calls[0].script
    if isinstance(answer, PromptqError) or answer in ("unknown", "exists"):
        if step.after.snapshot != step.before.snapshot:
            yield f"{step.move.ids} were refused, and something has changed"
    elif script == "requeue" and answer == "ok":
        yield from _what_is_wrong_with_new(step, step.move.ids[-1], step.move.ids[-1])
    elif script == "enqueue" and isinstance(answer, list):
        for asked, told in zip(step.move.ids, answer, strict=True):
            yield from _what_is_wrong_with_new(step, asked, told)
    elif script == "cancel" and isinstance(answer, list):
        for asked, status in zip(step.move.ids, answer, strict=True):
            yield from _what_is_wrong_with_cancelled(step, asked, status)


def _what_is_wrong_with_new(step: Step, asked: str, told: str) -> Problems:
    before, after, specs = step.before, step.after, step.world.by_id
    key = specs[asked].idempotency_key
    if asked != told and (key is None or key != specs[told].idempotency_key):
        yield f"{asked} is said to be {told}"
    if before.is_accepted(told):
        if all_of(before, told) != all_of(after, told):
            yield f"{told} was there before, and has changed"
    elif after.state(told) != "waiting":
        yield f"{told} was taken in and is {after.state(told) or 'absent'}"
    elif after.log(told) or after.fields(told).keys() & {"attempt", "last_event"}:
        yield f"{told} is new, and has {after.fields(told)} with {after.log(told)}"


def _what_is_wrong_with_cancelled(step: Step, asked: str, status: CancelStatus) -> Problems:
    before, after, was = step.before, step.after, step.before.state(asked)
    waited = was == "waiting" or asked in before.places
    expected = {
        CancelStatus.CANCELLED: waited and after.state(asked) == "cancelled",
        CancelStatus.FLAGGED: was == "active" and after.fields(asked).get("cancelled") == "1",
        CancelStatus.ACTIVE: was in ("waiting", "active") and after.state(asked) == was,
        CancelStatus.FINISHED: before.is_final(asked),
        CancelStatus.UNKNOWN: not before.is_accepted(asked) and not after.is_accepted(asked),
    }
    if not expected.get(status, False) and (was or status is not CancelStatus.ACTIVE):
        yield f"{asked} was {was or 'absent'}, is {after.state(asked)}; the answer: {status}"


def an_answer_to_who_gives_back_is_true(step: Step) -> Problems:
    """`waiting`: the worker held the request, which waits again, perhaps with a delay. `cancelled`,
    `dead`: the worker held the request, and the request has ended. `finished`: the request had
    ended before. `fenced`: the worker no longer held the request."""
    answer = step.outcome.answers[0]
    if step.move.calls[0].script != "release" or not isinstance(answer, list):
        return
    for (request_id, attempt), status in zip(step.move.holders, answer, strict=True):
        held = _holds(step.before, request_id, attempt)
        state, was_final = step.after.state(request_id), step.before.is_final(request_id)
        expected = "finished" if was_final else state if held else "fenced"
        if status != expected or (held and state == "active"):
            yield f"attempt {attempt} held {request_id}: {held}; it is {state}, told {status}"


def others_are_left_alone(step: Step) -> Problems:
    """A call that names requests does not change any other request."""
    if not step.move.ids:
        return
    for request_id in step.world.by_id:
        if request_id in step.move.ids:
            continue
        old, new = all_of(step.before, request_id), all_of(step.after, request_id)
        if old != new:
            yield f"{request_id} was {old} and is {new}"


def _holds(view: View, request_id: str, attempt: int) -> bool:
    return view.state(request_id) == "active" and view.attempt(request_id) == attempt


def all_of(view: View, request_id: str) -> tuple[object, ...]:
    """Returns all data of a request on the server."""
    return (view.fields(request_id), view.log(request_id), *sets_of(view, request_id))


def sets_of(view: View, request_id: str) -> tuple[float | None, ...]:
    """Returns the score of the id in each set (None if the id is not in the set), `pending`
    first."""
    sets = (view.pending, view.delayed, view.leases, view.deadlines, view.dead)
    return tuple(members.get(request_id) for members in sets)


CHANGE_INVARIANTS: tuple[StepInvariant, ...] = (
    what_has_ended_never_changes,
    a_log_only_grows,
    subscribers_hear_what_the_log_gets,
    only_the_newest_attempt_writes,
    others_are_left_alone,
)
"""These hold for each move that changes nothing, so they are not checked for such moves."""

ANSWER_INVARIANTS: tuple[StepInvariant, ...] = (
    scripts_raise_no_errors,
    who_lost_a_request_learns_it,
    an_answer_to_a_row_is_true,
    nothing_follows_a_cancel_but_the_end,
    an_answer_to_a_producer_is_true,
    an_answer_to_who_gives_back_is_true,
)


def a_claim_takes_what_waits(step: Step) -> Problems:
    """Only a claim begins an attempt. Before the claim, the request waits, or the claim itself
    returns the request to the queue. Nobody holds the request, and it is neither cancelled nor past
    its deadline. The attempt's number is one higher than the last, and the answer has this number
    and the log so far. The same call sent again begins no attempt, and gets the same answer."""
    claimed = {claim.request_id: claim for claim in step.claims}
    if len(claimed) < len(step.claims):
        yield "one claim hands out a request twice"
    for request_id in step.world.by_id:
        claim = claimed.get(request_id)
        if _is_given_again(step, request_id):
            fence = step.before.fields(request_id)["fence"]
            if claim is None or claim.fence != fence:
                yield f"{request_id} is not given again as {fence}"
            continue
        if claim is None and step.before is step.after:
            continue
        old, new = step.before.attempt(request_id), step.after.attempt(request_id)
        if claim is None:
            if new != old and step.after.fields(request_id):
                yield f"{request_id}: attempt {new} after {old} without a claim"
            continue
        if (claim.attempt, new, claim.fence) != (old + 1, old + 1, f"{old + 1}-{step.move.nonce}"):
            yield f"{request_id}: {claim.fence} in the answer, {new} in the hash, {old} before"
        was_free = step.before.state(request_id) == "waiting" or _was_never_heard_of(
            step, request_id
        )
        if not was_free or step.after.state(request_id) != "active":
            yield f"{request_id} was {step.before.state(request_id)} when it was handed out"
        if step.before.fields(request_id).get("cancelled") == "1":
            yield f"{request_id} was cancelled when it was handed out"
        if step.before.is_past_deadline(request_id):
            yield f"{request_id} was past its deadline when it was handed out"
        if step.before.is_spoilt(request_id):
            if not claim.is_spoilt:
                yield f"{request_id} was handed out as if nobody had written into its log"
            continue
        log = [TokenEvent.model_validate_json(event) for _, event in step.before.log(request_id)]
        if claim.events != log or claim.is_spoilt:
            yield f"{request_id} was handed out with {claim.events} instead of its log"


def a_lost_claim_comes_back(step: Step) -> Problems:
    """The next claim of a session may show that the last reply was lost. Then the requests of that
    reply wait again or are claimed again, and no crash is counted. Requests of other sessions, and
    requests whose reply arrived, do not change. The server remembers the requests of the last
    claim. A claim that arrives after a later one returns no request and takes none back."""
    if step.move.kind not in ("claim", "session", "overtaken"):
        return
    if _is_overtaken(step):
        if step.claims or step.before is not step.after:
            yield f"a claim that was overtaken gives {step.claims} or changes something"
        return
    for request_id in step.world.by_id:
        old, new = step.before.fields(request_id), step.after.fields(request_id)
        if _was_never_heard_of(step, request_id):
            if new.get("fence") == old.get("fence"):
                yield f"{request_id} stays where nobody knows of it"
            if new.get("crashes") != old.get("crashes"):
                yield f"{request_id}: a lost reply was counted as a crash"
        elif step.before.state(request_id) == "active" and (
            old != new
            or (
                not _is_given_again(step, request_id)
                and step.before.leases.get(request_id) != step.after.leases.get(request_id)
            )
        ):
            yield f"{request_id} was held, as {old}, and is {new}"
    session, answered = step.move.context.session, step.move.context.answered
    expected = step.before.claimed.get(session)
    if expected and expected[0] not in (answered, step.move.nonce):
        expected = None
    if session and step.claims:
        expected = (step.move.nonce, tuple(claim.request_id for claim in step.claims))
    if step.after.claimed.get(session) != expected:
        yield f"the session was given {expected}, the server has {step.after.claimed.get(session)}"


def _is_overtaken(step: Step) -> bool:
    """Whether a later claim of the session has returned requests already."""
    context = step.move.context
    return 0 < context.number < step.before.claim_numbers.get(context.session, 0)


def _was_never_heard_of(step: Step, request_id: str) -> bool:
    """Whether the last claim of this session holds the request, and the session did not get the
    reply.
    """
    session, answered = step.move.context.session, step.move.context.answered
    last, _ = step.before.claimed.get(session, ("", ()))
    is_known = last in (answered, step.move.nonce) or _is_overtaken(step)
    return not is_known and request_id in step.before.held_by_last_claim(session)


def _is_given_again(step: Step, request_id: str) -> bool:
    """Whether this call repeats the session's last claim, which returned this request."""
    session, answered = step.move.context.session, step.move.context.answered
    last, _ = step.before.claimed.get(session, ("", ()))
    is_same = last != "" and last == step.move.nonce and last != answered
    return is_same and request_id in step.before.held_by_last_claim(session)


CLAIM_INVARIANTS: tuple[StepInvariant, ...] = (a_claim_takes_what_waits, a_lost_claim_comes_back)
