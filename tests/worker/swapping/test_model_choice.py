"""The rule that says which of several models is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from promptq.shared.queue.statistics import Work
from promptq.worker.swapping.model_choice import Candidate, Loaded, SwapTimes, choose

TIMES = SwapTimes(least_loaded=15, longest_wait=60, idle=300)
NEVER = float("-inf")
MINUTE_MS = 60_000.0


def work(num_waiting: int = 0, waited: float = 0.0, **more: Any) -> Work:
    """A queue whose front has waited for so many seconds, at priority 0, when it is `now`=1000."""
    front = 1000 * (1000 - waited) if num_waiting else None
    found = Work(num_waiting=num_waiting, oldest_ms=int(1000 * waited), front=front)
    return replace(found, **more)


def candidate(found: Work, left_at: float = NEVER, load_seconds: float = 5.0) -> Candidate:
    return Candidate(found, left_at, load_seconds)


def chosen(
    own: Work, since: float = 100.0, worked_at: float = 1000.0, now: float = 1000.0, **others: Any
) -> str | None:
    """Returns the model to load in place of `own`, or `own` if it stays; None if there is none."""
    loaded = Loaded("own", since, worked_at)
    candidates = {
        name: it if isinstance(it, Candidate) else candidate(it) for name, it in others.items()
    }
    choice = choose(TIMES, loaded, own, candidates, now)
    return "own" if choice is None else choice.queue


def test_if_nothing_is_loaded_whatever_came_first_is() -> None:
    candidates = {"a": candidate(work(5, 3)), "b": candidate(work(1, 4)), "c": candidate(work())}
    choice = choose(TIMES, None, Work(), candidates, 1000.0)
    assert choice is not None
    assert choice.queue == "b"
    assert choose(TIMES, None, Work(), {"c": candidate(work())}, 1000.0) is None


def test_a_model_without_work_makes_room_at_once() -> None:
    assert chosen(work(), since=999.0, a=work(1, 0.5)) == "a"


@pytest.mark.parametrize("own", [work(1, 500), work(num_active=1)])
def test_one_with_work_stays_for_the_least_time(own: Work) -> None:
    urgent = work(1, 900, deadlines_ms=[100])
    assert chosen(own, since=985.5, a=urgent) == "own"
    assert chosen(own, since=985.0, a=urgent) == "a"


def test_while_both_have_work_the_other_waits_for_the_longest_time() -> None:
    """However old the backlog of the loaded one is."""
    assert chosen(work(9, 800), a=work(1, 59)) == "own"
    assert chosen(work(9, 800), a=work(1, 60)) == "a"


def test_waiting_while_its_own_model_was_loaded_does_not_count() -> None:
    """Or two backlogs that are older than the longest wait would change places all the time."""
    backlog = work(1000, 800)
    assert chosen(backlog, a=candidate(backlog, left_at=941)) == "own"
    assert chosen(backlog, a=candidate(backlog, left_at=940)) == "a"


def test_what_only_runs_may_be_drained_for_another_ones_work() -> None:
    assert chosen(work(num_active=3), a=work(1, 1)) == "a"


def test_priorities_count_across_queues() -> None:
    """A level more urgent is as if it had come a minute earlier, as within a queue."""
    own, other = work(9, 10), work(1, 10)
    assert other.front is not None
    assert chosen(own, a=replace(other, front=other.front - MINUTE_MS)) == "a"
    assert chosen(own, a=replace(other, front=other.front - MINUTE_MS + 1)) == "own"
    assert chosen(own, a=replace(other, front=other.front + MINUTE_MS)) == "own"


def test_the_more_urgent_of_two_others_comes_first() -> None:
    first, second = work(1, 10), work(1, 20)
    assert chosen(work(), a=first, b=second) == "b"
    assert first.front is not None
    assert chosen(work(), a=replace(first, front=first.front - MINUTE_MS), b=second) == "a"


def test_a_deadline_is_met_if_loading_now_can_meet_it() -> None:
    """Not earlier than necessary, and not at the cost of a nearer one."""
    tokens = {"tokens_of_answer": 100.0, "tokens_of_worker": 50.0}  # 2 s for an answer
    far, near = work(1, 1, deadlines_ms=[9100], **tokens), work(1, 1, deadlines_ms=[8900], **tokens)
    own = work(9, 1)
    assert chosen(own, a=candidate(far, load_seconds=5)) == "own"
    assert chosen(own, a=candidate(near, load_seconds=5)) == "a"
    assert chosen(replace(own, deadlines_ms=[8000]), a=candidate(near, load_seconds=5)) == "own"


def test_a_paused_queue_asks_for_nothing() -> None:
    assert chosen(work(9, 1), a=work(9, 900, is_paused=True)) == "own"
    assert chosen(work(9, 900, is_paused=True), since=999.0, a=work(1, 1)) == "a"


def test_what_has_no_work_for_long_is_unloaded() -> None:
    assert chosen(work(), worked_at=700.1, a=work()) == "own"
    assert chosen(work(), worked_at=700.0, a=work()) is None
    assert chosen(work(num_delayed=1), worked_at=700.0, a=work()) == "own", "it is due soon"
