"""Autoscaling: computes the number of workers that a queue should have, and the reason."""

from __future__ import annotations

import math
from contextlib import suppress
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, Field
from redis.exceptions import ResponseError

from promptq.producer.admin.autoscaling_defaults import TARGET_SECONDS
from promptq.producer.admin.queue_views import views_of_queues
from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.keys import Keys
from promptq.shared.queue.call import Operation
from promptq.shared.queue.statistics import WINDOW_SECONDS, Work, measure_work

_MOST_BUSY = 0.8
"""Fraction of the workers' speed that arrivals may use. At 1, a backlog would never shrink."""
_MOST_FULL = 0.5
"""The largest fraction of slots to fill while the speed of a worker is not measured yet."""
_START_SECONDS = 10.0
"""Seconds that a new worker needs to start. It cannot help a request whose deadline is earlier."""
_HALF_DONE = 0.5
"""The fraction of a running request's tokens that are not generated yet, on average."""


class Reason(StrEnum):
    """A reason for a number of workers, with a description in words."""

    IDLE = "idle", "nothing waits, runs or is due soon"
    SOME_WORK = "some_work", "one worker is enough"
    RECENT = "recent", "a request ran in the last minute"
    UNMEASURED = "unmeasured", "the speed of a worker is not measured yet"
    ARRIVALS = "arrivals", "the arriving requests need them"
    BACKLOG = "backlog", "the waiting requests need them"
    RUNNING = "running", "the running requests need them"
    DEADLINES = "deadlines", "with fewer, requests would miss deadlines"
    OLDEST = "oldest", "a request has waited for too long"

    words: str

    def __new__(cls, value: str, words: str) -> Self:
        reason = str.__new__(cls, value)
        reason._value_, reason.words = value, words
        return reason


class Scaling(BaseModel):
    """The number of workers that a queue should have, and why. `waiting_seconds` and
    `running_seconds` are seconds of work for one worker. `arriving_seconds` is the work that
    arrives in each second. These times are None if not measured."""

    queue: str
    desired: int = Field(description="Number of workers that there should be.")
    reason: Reason = Field(description="The reason that needs the most workers.")
    because: str = Field(description="The reason in words.")
    workers: int = Field(
        description="Workers that claim; not those that drain or whose inference server is away."
    )
    waiting: int
    running: int = Field(description="Requests that workers hold.")
    due_soon: int = Field(description="Delayed requests that are due within a minute.")
    waiting_seconds: float | None = Field(
        description="Time that one worker needs for the waiting requests."
    )
    running_seconds: float | None = Field(
        description="Time that one worker needs for the running requests."
    )
    arriving_seconds: float | None = Field(
        description="Work that arrives in one second; 2.5 keeps two and a half workers busy."
    )
    oldest_seconds: float = Field(description="How long the oldest request has waited.")
    deadlines_at_risk: int = Field(
        description="Requests that would miss their deadlines with the present workers."
    )
    tokens_per_second: float | None = Field(
        description="Tokens a second that one worker generates while requests wait."
    )
    tokens_per_request: float = Field(description="Mean tokens of the last 128 answers.")


def scaling(keys: Keys, /, target_seconds: float = TARGET_SECONDS) -> Operation[Scaling]:
    """Computes how many workers the queue needs so that no request waits over `target_seconds`.

    Raises ConfigurationError if `target_seconds` is not above 0.
    """
    work: Work = yield measure_work(keys)
    return scaling_of(keys.queue, work, target_seconds)


def scalings(keys: Keys, /, target_seconds: float = TARGET_SECONDS) -> Operation[list[Scaling]]:
    """Computes a `scaling` for each of the server's queues that this Redis user may read."""
    scalings: list[Scaling] = []
    for view in (yield from views_of_queues(keys)):
        with suppress(ResponseError):  # its record was overwritten meanwhile
            scalings += [(yield from scaling(Keys(view.queue), target_seconds))]
    return scalings


def scaling_of(queue: str, work: Work, target_seconds: float = TARGET_SECONDS) -> Scaling:
    """Returns the scaling for a load. Raises ConfigurationError unless the target is above 0."""
    if not 0 < target_seconds < math.inf:
        raise ConfigurationError(f"target: {target_seconds} is not a number of seconds above 0")
    wanted = _wanted(work, target_seconds)
    reason = max(wanted, key=wanted.__getitem__)

    def seconds(tokens: float) -> float | None:
        return round(tokens / work.tokens_of_worker, 3) if work.tokens_of_worker else None

    return Scaling(
        queue=queue,
        desired=wanted[reason],
        reason=reason,
        because=reason.words,
        workers=work.num_workers,
        waiting=work.num_waiting,
        running=work.num_active,
        due_soon=work.num_delayed,
        waiting_seconds=seconds(work.tokens_waiting),
        running_seconds=seconds(_tokens_running(work)),
        arriving_seconds=seconds(work.tokens_requested),
        oldest_seconds=work.oldest_ms / 1000,
        deadlines_at_risk=_at_risk(work, work.seconds_of_answer),
        tokens_per_second=work.tokens_of_worker or None,
        tokens_per_request=round(work.tokens_of_answer, 1),
    )


def _wanted(work: Work, target_seconds: float) -> dict[Reason, int]:
    """Returns how many workers each reason needs. If two reasons need the most workers, the first
    one is reported."""
    num_waiting = 0 if work.is_paused else work.num_waiting
    wanted = {Reason.IDLE: 0}
    if num_waiting or work.num_active or (work.num_delayed and not work.is_paused):
        wanted[Reason.SOME_WORK] = 1
    elif work.tokens_requested > 0:
        wanted[Reason.RECENT] = min(1, work.num_workers)
    is_late = num_waiting > 0 and work.oldest_ms > 1000 * target_seconds
    # Requests that find a free slot do not wait. Workers hold some requests for which they have no
    # slot yet, and a large request may not fit even into a free slot.
    num_free = 0 if is_late else work.num_slots - work.num_active
    each = work.seconds_of_answer
    if work.num_slots:
        share = _MOST_FULL if each is None else 1.0
        places = work.num_slots / work.num_workers * share
        num_running = max(work.num_running, min(work.num_active, work.num_slots))
        wanted[Reason.RUNNING] = min(work.num_workers, math.ceil(num_running / places))
    if each is None:
        if num_waiting > num_free:
            wanted[Reason.UNMEASURED] = work.num_workers
        return wanted
    if num_waiting > num_free:
        left = num_waiting + work.num_active * _HALF_DONE
        tokens = _tokens_running(work) + (0 if work.is_paused else work.tokens_waiting)
        needed = tokens / (work.tokens_of_worker * target_seconds)
        wanted[Reason.BACKLOG] = math.ceil(min(needed, left))
    if not work.is_paused:
        busy = work.tokens_requested / (work.tokens_of_worker * _MOST_BUSY)
        num_requests = max(1.0, work.tokens_requested * WINDOW_SECONDS / work.tokens_of_answer)
        arrivals = math.ceil(round(min(busy, num_requests), 6))
        has_work = Reason.SOME_WORK in wanted
        wanted[Reason.ARRIVALS] = arrivals if has_work else min(arrivals, work.num_workers)
        wanted[Reason.DEADLINES] = _for_deadlines(work, each)
    if is_late:
        wanted[Reason.OLDEST] = work.num_workers
    return wanted


def _tokens_running(work: Work) -> float:
    """Returns the output tokens that running requests still need."""
    return work.num_active * _HALF_DONE * work.tokens_of_answer


def _for_deadlines(work: Work, each: float) -> int:
    """Returns how many workers are needed so that requests meet their deadlines.

    Deadlines in less than `_START_SECONDS` do not count: a new worker would come too late. Assumes
    that requests run in the order of their deadlines, and that a request takes `each` seconds.
    """
    most = 0
    for nth, ms in enumerate(work.deadlines_ms, 1):
        if ms >= 1000 * _START_SECONDS:
            most = max(most, math.ceil(min(nth, nth * each * 1000 / ms)))
    return most


def _at_risk(work: Work, each: float | None) -> int:
    if each is None:
        return 0
    if work.num_workers == 0:
        return len(work.deadlines_ms)
    each_ms = 1000 * each / work.num_workers
    return sum(nth * each_ms > ms for nth, ms in enumerate(work.deadlines_ms, 1))
