"""What holds of every claim, once in words (the docstring) and once in code."""

from __future__ import annotations

from promptq.shared.protocol.events import TokenEvent
from tests.programs.states.invariants.states import Problems
from tests.programs.states.invariants.steps import Step, StepInvariant


def a_claim_takes_what_waits(step: Step) -> Problems:
    """A claim, and nothing else, begins an attempt: of a request that waits, or comes back by this
    very claim, that nobody holds and that is not to end. It is one higher than the last, and its
    answer says so, with the log so far. The same call once more begins none, and gives the same.
    """
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
    """What the last claim of a session gave comes back with the next one, if the session says that
    it never heard of it: it waits again or is handed out anew, and no crash is counted. What others
    hold, or the session heard of, stays as it is. The server knows what the last claim gave. A
    claim that comes later than one behind it gives nothing and takes nothing back.
    """
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
    """Whether a later claim of the session gave something already."""
    context = step.move.context
    return 0 < context.number < step.before.claim_numbers.get(context.session, 0)


def _was_never_heard_of(step: Step, request_id: str) -> bool:
    """Whether only the last claim of the session that claims now has the request, and the session
    does not know of it.
    """
    session, answered = step.move.context.session, step.move.context.answered
    last, _ = step.before.claimed.get(session, ("", ()))
    is_known = last in (answered, step.move.nonce) or _is_overtaken(step)
    return not is_known and request_id in step.before.held_by_last_claim(session)


def _is_given_again(step: Step, request_id: str) -> bool:
    """Whether this is the session's last claim once more, and the request what it gave."""
    session, answered = step.move.context.session, step.move.context.answered
    last, _ = step.before.claimed.get(session, ("", ()))
    is_same = last != "" and last == step.move.nonce and last != answered
    return is_same and request_id in step.before.held_by_last_claim(session)


CLAIM_INVARIANTS: tuple[StepInvariant, ...] = (a_claim_takes_what_waits, a_lost_claim_comes_back)
