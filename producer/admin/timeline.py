"""The timeline of one request: what happened to the request, in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ValidationError

from promptq.producer.admin.queue_stats import stats
from promptq.producer.admin.request_fields import (
    EndedAttempt,
    ended_attempts,
    json_object,
    object_in_parts,
    whole,
)
from promptq.shared.errors import RequestNotFoundError
from promptq.shared.protocol.events import ErrorInfo, Stats, Usage
from promptq.shared.protocol.keys import Keys, check_request_id
from promptq.shared.protocol.request import RequestState
from promptq.shared.protocol.worker_stats import SlotStats
from promptq.shared.queue import lookups, statistics
from promptq.shared.queue.call import PAUSE, Operation
from promptq.shared.runtime.turns import sliced

_FIELDS = (
    *("state", "payload", "tenant", "priority", "attempt", "crashes", "history", "worker"),
    *("requeued_from", "forked_from", "enqueued_at", "claimed_at", "first_token_at"),
    *("finished_at", "finish_reason", "last_event"),
)
"""All fields of a request's hash except the result, which is large."""


class Happened(StrEnum):
    """Kinds of moments. Moments with the same time are sorted in the order of this list."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"  # noqa: S105 # of an output
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    GIVEN_BACK = "given_back"
    CRASHED = "crashed"
    CLAIM_LOST = "claim_lost"
    FINISHED = "finished"


_HOW = {
    "given back": Happened.GIVEN_BACK,
    "its claim was lost": Happened.CLAIM_LOST,
}  # anything else in `history` is a crash
_RANKS = {what: rank for rank, what in enumerate(Happened)}


class Moment(BaseModel):
    """One thing that happened to a request. Within an attempt, `attempt` and `worker` are set."""

    at: int
    """Time in Unix milliseconds of the server."""
    what: Happened
    attempt: int = 0
    worker: str = ""
    detail: str = ""
    """How an unfinished attempt ended, or the request's finish reason; otherwise empty."""


class Timeline(BaseModel):
    """A request's fields in Redis, and its moments in order of time.

    For an attempt before the last one, the only moments are its beginning, its end, and perhaps the
    first token.
    """

    request_id: str
    state: RequestState
    waits_because: str = ""
    """Why no worker claims the waiting request, with advice; empty if a worker may claim it."""
    payload: str
    tenant: str | None = None
    priority: int = 0
    attempts: int = 0
    crashes: int = 0
    requeued_from: str = ""
    """The id of the dead letter that was enqueued again as this request; empty for others."""
    forked_from: str = ""
    """The id of the request whose output this request continues; empty if this is no fork."""
    forked_at: int | None = None
    """Number of the source's output tokens that the fork repeats at its beginning."""
    worker: str = ""
    """The worker that holds the request, or that held it last."""
    slot: SlotStats | None = None
    """The request's slot in the worker's batch; None if the request is not in the batch."""
    finish_reason: str = ""
    usage: Usage | None = None
    stats: Stats | None = None
    error: ErrorInfo | None = None
    moments: list[Moment] = []


def timeline(keys: Keys, /, request_id: str) -> Operation[Timeline]:
    """Reads the timeline of a request. Raises RequestNotFoundError."""
    record: dict[str, str] = yield lookups.fields(keys, check_request_id(request_id), _FIELDS)
    if not record:
        raise RequestNotFoundError(f"request {request_id!r} is unknown, or ended long ago")
    state, worker, slot = lookups.state_of(record.get("state", "")), record.get("worker", ""), None
    if state is RequestState.ACTIVE and worker:
        _, slots = yield statistics.slots(keys, worker)
        slot = next((each for each in slots if each.request_id == request_id), None)
    last = yield from sliced(object_in_parts(record.get("last_event")), PAUSE)
    forked_at, _, forked_from = record.get("forked_from", "").partition(" ")
    result = Timeline(
        request_id=request_id,
        state=state,
        waits_because=(yield from stats(keys)).why_waiting() if state == "waiting" else "",
        payload=record.get("payload", ""),
        tenant=record.get("tenant") or None,
        priority=_priority(record),
        attempts=whole(record.get("attempt")),
        crashes=whole(record.get("crashes")),
        requeued_from=record.get("requeued_from", ""),
        forked_from=forked_from,
        forked_at=whole(forked_at) if forked_from else None,
        worker=worker,
        slot=slot,
        finish_reason=record.get("finish_reason", ""),
        usage=_model(Usage, last.get("usage")),
        stats=_model(Stats, last.get("stats")),
        error=_model(ErrorInfo, last.get("error")),
    )
    moments = _moments(result, record)
    result.moments = sorted(moments, key=lambda each: (each.at, each.attempt, _RANKS[each.what]))
    return result


def _moments(timeline: Timeline, record: dict[str, str]) -> Iterator[Moment]:
    if enqueued_at := whole(record.get("enqueued_at")):
        yield Moment(at=enqueued_at, what=Happened.ENQUEUED)
    history = ended_attempts(record.get("history"))
    for ended in history:
        of_attempt = {"attempt": ended.attempt, "worker": ended.worker}
        yield Moment(at=ended.claimed_at, what=Happened.CLAIMED, **of_attempt)
        what = _HOW.get(ended.how, Happened.CRASHED)
        yield Moment(at=ended.ended_at, what=what, detail=ended.how, **of_attempt)
    last = EndedAttempt(attempt=timeline.attempts, worker=timeline.worker)
    first_token_at = whole(record.get("first_token_at"))
    finished_at = whole(record.get("finished_at"))
    if at := first_token_at:
        holder = next((one for one in history if one.claimed_at <= at <= one.ended_at), last)
        what = Happened.FIRST_TOKEN
        yield Moment(at=at, what=what, attempt=holder.attempt, worker=holder.worker)
    claimed_at = whole(record.get("claimed_at"))
    if claimed_at and timeline.attempts not in {ended.attempt for ended in history}:
        yield from _of_this_attempt(timeline, claimed_at, first_token_at, finished_at)
    if at := finished_at:
        of_last = {"attempt": last.attempt, "worker": last.worker}
        yield Moment(at=at, what=Happened.FINISHED, detail=timeline.finish_reason, **of_last)


def _of_this_attempt(
    timeline: Timeline, claimed_at: int, first_token_at: int, finished_at: int
) -> Iterator[Moment]:
    def moment(what: Happened, at: int) -> Moment:
        return Moment(at=at, what=what, attempt=timeline.attempts, worker=timeline.worker)

    yield moment(Happened.CLAIMED, claimed_at)
    slot, stats = timeline.slot, timeline.stats
    times = slot or stats
    prefill_at = slot.prefill_at if slot else None
    if slot is None and stats is not None and stats.prompt_ms:
        if first_token_at >= claimed_at:
            prefill_at = first_token_at - round(stats.prompt_ms)
        else:  # an earlier attempt had the first token
            prefill_at = finished_at - round(stats.prompt_ms + stats.generation_ms)
        prefill_at = max(claimed_at, prefill_at)
    if prefill_at is not None:
        yield moment(Happened.PREFILL, prefill_at)
    for at in (times.preempted_at if times else None) or []:
        yield moment(Happened.PREEMPTED, at)
    for at in (times.resumed_at if times else None) or []:
        yield moment(Happened.RESUMED, at)


def _priority(record: dict[str, str]) -> int:
    with suppress(ValueError):
        return int(record.get("priority", ""))
    priority = json_object(record.get("payload")).get("priority")
    return priority if isinstance(priority, int) else 0


def _model(kind: type[Any], value: Any) -> Any:
    try:
        return kind.model_validate(value) if isinstance(value, dict) else None
    except ValidationError:
        return None
