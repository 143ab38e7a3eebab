"""Decides which of several models should be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from promptq.shared.queue.statistics import Work

_SPARE_SECONDS = 2.0  # a model is loaded this much earlier than a deadline requires


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """The limits by which `choose` decides, in seconds."""

    least_loaded: float
    """A model that has work stays loaded for at least this many seconds."""
    longest_wait: float
    """The most seconds that requests wait for their model while another model has work."""
    idle: float
    """A model is unloaded after it has had no work for this many seconds."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded model. Times are in seconds, on the clock that `choose` gets as `now`."""

    queue: str
    since: float
    worked_at: float
    """The later of two times: when the model was loaded, and when its queue last had work."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queue whose model is not loaded."""

    work: Work
    left_at: float
    """When the queue's model was last unloaded; minus infinity if it was never loaded."""
    load_seconds: float
    """Expected seconds from the order to load the model until the model serves."""

    def waited_seconds(self, now: float) -> float:
        """Returns the seconds since the queue's first request arrived or since the queue's model
        was unloaded, whichever was later."""
        return min(self.work.oldest_ms / 1000, now - self.left_at)

    @property
    def front(self) -> float:
        """The score (place in the queue) of the first waiting request; 0 if none waits."""
        return 0.0 if self.work.front is None else self.work.front

    @property
    def must_start_now(self) -> bool:
        """Whether a deadline will be missed unless the model is loaded now."""
        if not self.work.deadlines_ms:
            return False
        needed = self.load_seconds + (self.work.seconds_of_answer or 0.0) + _SPARE_SECONDS
        return self.work.deadlines_ms[0] <= 1000 * needed


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision to load the model of `queue` (None: to load no model), and the reason."""

    queue: str | None
    because: str


def choose(
    times: SwapTimes,
    loaded: Loaded | None,
    own: Work,
    candidates: Mapping[str, Candidate],
    now: float,
) -> Choice | None:
    """Returns the decision to change the loaded model; None if no change is needed. `own` is the
    work in the loaded model's queue.

    The rule compares the scores of requests of different queues, as if they waited in one queue. A
    score is the time of arrival plus the priority. By default, one level of priority counts as much
    as an arrival one minute earlier.
    """
    waiting = {queue: each for queue, each in candidates.items() if _waits(each.work)}
    first = min(waiting, key=lambda queue: waiting[queue].front, default=None)
    if loaded is None:
        return Choice(first, "it has work") if first is not None else None
    has_work = own.num_active > 0 or _waits(own)
    if first is None:
        is_idle = not has_work and not own.num_delayed
        if is_idle and now - loaded.worked_at >= times.idle:
            return Choice(None, f"no work for {times.idle:g} s")
        return None
    if has_work and now - loaded.since < times.least_loaded:
        return None
    at_risk = {queue: each for queue, each in waiting.items() if each.must_start_now}
    if at_risk:
        queue = min(at_risk, key=lambda queue: at_risk[queue].work.deadlines_ms[0])
        if not own.deadlines_ms or at_risk[queue].work.deadlines_ms[0] < own.deadlines_ms[0]:
            return Choice(queue, "a request would miss its deadline")
    longest = max(waiting, key=lambda queue: waiting[queue].waited_seconds(now))
    seconds = waiting[longest].waited_seconds(now)
    if seconds >= times.longest_wait:
        return Choice(longest, f"a request has waited for {seconds:.0f} s")
    if not _waits(own):
        return Choice(first, "it has work, and nothing waits for the other")
    if own.front is not None and own.front - waiting[first].front >= 1000 * times.longest_wait:
        return Choice(first, "its requests are more urgent")
    return None


def _waits(work: Work) -> bool:
    return work.num_waiting > 0 and not work.is_paused
