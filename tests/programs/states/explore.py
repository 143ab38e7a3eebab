"""Explores every state of small queues, and walks at random through a larger one."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from promptq.shared.protocol.rows import RowStatus
from promptq.shared.server.embedded import EmbeddedServer
from tests.programs.states.calls import Move
from tests.programs.states.invariants.states import STATE_INVARIANTS, StateInvariant
from tests.programs.states.invariants.steps import (
    ANSWER_INVARIANTS,
    CHANGE_INVARIANTS,
    CLAIM_INVARIANTS,
    Step,
    StepInvariant,
)
from tests.programs.states.invariants.upkeep import UPKEEP_INVARIANTS
from tests.programs.states.moves import moves
from tests.programs.states.server import Outcome, StatesServer
from tests.programs.states.world import WORKERS, View, World
from tests.programs.states.worlds import LARGE, SMALL, WALKED
from tests.support.roles import drop_password
from tests.support.servers import PROGRAMS

_ANSWERS = ANSWER_INVARIANTS + CLAIM_INVARIANTS + UPKEEP_INVARIANTS


@dataclass(frozen=True)
class Invariants:
    """The invariants to check. `progress` is the invariant about all states together."""

    states: Collection[StateInvariant] = STATE_INVARIANTS
    changes: Collection[StepInvariant] = CHANGE_INVARIANTS
    answers: Collection[StepInvariant] = _ANSWERS
    progress: bool = True

    @classmethod
    def only(cls, name: str) -> Invariants:
        """Returns only the invariant of this name."""
        return cls(
            [it for it in STATE_INVARIANTS if it.__name__ == name],
            [it for it in CHANGE_INVARIANTS if it.__name__ == name],
            [it for it in _ANSWERS if it.__name__ == name],
            name == "progress",
        )

    @property
    def names(self) -> list[str]:
        checks = (*self.states, *self.changes, *self.answers)
        return [it.__name__ for it in checks] + ["progress"] * self.progress

    def of_step(self, step: Step) -> Iterator[tuple[str, str]]:
        """Yields the invariants that a move breaks, each with a description."""
        has_changed = step.before is not step.after or step.outcome.heard
        for invariants in (self.changes if has_changed else (), self.answers):
            for invariant in invariants:
                for problem in invariant(step):
                    yield invariant.__name__, problem


ALL_INVARIANTS = Invariants()


def _numbered(trace: list[str]) -> str:
    return "\n".join(f"  {number}. {text}" for number, text in enumerate(trace, 1))


class ViolationError(AssertionError):
    """An invariant does not hold. The message lists the moves that lead there."""

    def __init__(self, invariant: str, problem: str, trace: list[str]) -> None:
        super().__init__(f"{invariant}: {problem}\nafter\n{_numbered(trace)}")
        self.invariant = invariant


class TooManyStatesError(AssertionError):
    """A world has more states than allowed, because scripts never reach a stable state. The message
    lists the moves to the last state, which show the endless loop."""


MOST_STATES = 1_000_000


@dataclass
class Explored:
    """The result of an exploration. `moves` counts the moves that were made on the server. All
    invariants were checked for each move."""

    states: int = 0
    moves: int = 0
    seconds: float = 0.0
    deepest: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    """Number of moves of each kind that changed the state."""
    statuses: set[RowStatus] = field(default_factory=set)
    """The statuses of rows that occurred."""


@dataclass(slots=True)
class _Seen:
    came_from: int
    by: str
    is_done: bool
    """Whether all existing requests have ended."""
    goes_on_to: list[int] = field(default_factory=list)
    """States that fair moves lead to."""


def explore(
    world: World,
    port: int,
    texts: Mapping[str, str] | None = None,
    invariants: Invariants = ALL_INVARIANTS,
    most_states: int = MOST_STATES,
) -> Explored:
    """Visit every state and make every move in it. Raises ViolationError, TooManyStatesError."""
    server = StatesServer(port, texts)
    try:
        return _Exploration(world, invariants, most_states).run(server)
    finally:
        server.close()


class _Exploration:
    def __init__(self, world: World, invariants: Invariants, most_states: int) -> None:
        self._world = world
        self._invariants = invariants
        self._most_states = most_states
        self._seen: list[_Seen] = []
        self._numbers: dict[bytes, int] = {}  # by digest, as states are long and many
        self._views: dict[int, View] = {}  # of the level that is explored and the next one
        self._explored = Explored()

    def run(self, server: StatesServer) -> Explored:
        started = time.monotonic()
        level = [self._number(self._world.start, -1, "")]
        while level:
            level = list(self._next_level(server, level))
            self._explored.deepest += bool(level)
            self._views = {number: self._views[number] for number in level}
        if self._invariants.progress:
            self._check_progress()
        self._explored.states = len(self._seen)
        self._explored.seconds = time.monotonic() - started
        return self._explored

    def _next_level(self, server: StatesServer, level: list[int]) -> Iterator[int]:
        made: list[tuple[int, Move]] = []

        def wanted() -> Iterator[tuple[bytes, Move]]:
            for number in level:
                view = self._views[number]
                for move in moves(self._world, view):
                    made.append((number, move))
                    yield view.snapshot, move

        for at, outcome in enumerate(server.steps(wanted())):
            number, move = made[at]
            known = len(self._seen)
            reached = number
            if outcome.after != self._views[number].snapshot:  # as most moves leave it
                reached = self._number(canonical(outcome.after), number, move.text)
            self._check_step(number, move, outcome, reached)
            if reached == known:
                yield reached

    def _number(self, snapshot: bytes, came_from: int, by: str) -> int:
        digest = hashlib.blake2b(snapshot, digest_size=16).digest()
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._seen)
            view = self._views[number] = View(snapshot)
            self._seen.append(_Seen(came_from, by, is_done(self._world, view)))
            for invariant in self._invariants.states:
                for problem in invariant(self._world, view):
                    raise self._violation(invariant.__name__, problem, number)
            if len(self._seen) > self._most_states:
                raise TooManyStatesError(
                    f"more than {self._most_states:,} states; one of the last comes after\n"
                    + _numbered(self._trace_to(number))
                )
        return number

    def _check_step(self, number: int, move: Move, outcome: Outcome, reached: int) -> None:
        explored, before = self._explored, self._views[number]
        explored.moves += 1
        after = before
        if outcome.after != before.snapshot:
            explored.kinds[move.kind] = explored.kinds.get(move.kind, 0) + 1
            if move.is_fair:
                self._seen[number].goes_on_to.append(reached)
            known = self._views.get(reached)
            # If two workers' names were exchanged, the view is not of exactly this state.
            is_same = known is not None and known.snapshot == outcome.after
            after = known if known is not None and is_same else View(outcome.after)
        step = Step(self._world, before, move, outcome, after)
        if step.published is not None:
            explored.statuses.update(step.published.rows)
        for name, problem in self._invariants.of_step(step):
            raise self._violation(name, problem, number, move.text)

    def _check_progress(self) -> None:
        """Check that fair moves end all existing requests from every state, even if all current
        holders are gone."""
        leads_from: dict[int, list[int]] = {}
        for number, seen in enumerate(self._seen):
            for reached in seen.goes_on_to:
                leads_from.setdefault(reached, []).append(number)
        open_ends = [n for n, seen in enumerate(self._seen) if seen.is_done]
        good = set(open_ends)
        while open_ends:
            for number in leads_from.get(open_ends.pop(), ()):
                if number not in good:
                    good.add(number)
                    open_ends.append(number)
        for number in range(len(self._seen)):
            if number not in good:
                raise self._violation("progress", "nothing leads to the end", number)

    def _violation(self, name: str, problem: str, number: int, *then: str) -> ViolationError:
        return ViolationError(name, problem, [*self._trace_to(number), *then])

    def _trace_to(self, number: int) -> list[str]:
        trace = []
        while number > 0:
            trace.append(self._seen[number].by)
            number = self._seen[number].came_from
        return trace[::-1]


def is_done(world: World, view: View) -> bool:
    """Whether all existing requests have ended, and no id of a deleted request waits. In a world
    with sweeps, also whether no orphaned key is left."""
    sweeps = "sweep" in world.moves
    for request_id in world.by_id:
        is_there = view.is_accepted(request_id) or request_id in view.places
        is_there = is_there or (sweeps and view.is_orphan(request_id))
        if is_there and not view.is_final(request_id):
            return False
    return True


_A, _B = (name.encode() for name in WORKERS[:2])


def canonical(snapshot: bytes) -> bytes:
    """Returns the state, or the state with the first two workers exchanged: the one that sorts
    first."""
    exchanged = snapshot.replace(_A, b"\0").replace(_B, _A).replace(b"\0", _B)
    return min(snapshot, exchanged)


_MOST_ROUNDS = 100


def walk(
    world: World,
    port: int,
    num_walks: int,
    num_steps: int,
    texts: Mapping[str, str] | None = None,
    shortens: bool = True,
) -> Counter[str]:
    """Walk through the world at random, and check all invariants at every step.

    Returns how often each kind of move changed the state. Raises ViolationError with a walk to the
    violation, and with the blob by which Hypothesis repeats the walk. If `shortens`, Hypothesis
    first looks for the shortest walk.
    """
    server = StatesServer(port, texts)
    options = settings(
        max_examples=num_walks,
        stateful_step_count=num_steps,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[phase for phase in Phase if shortens or phase is Phase.generate],
    )
    changes: Counter[str] = Counter()
    try:
        run_state_machine_as_test(_walker(world, server, changes), settings=options)
    finally:
        server.close()
    return changes


def _walker(
    world: World, server: StatesServer, changes: Counter[str]
) -> type[RuleBasedStateMachine]:
    class Walk(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self._view = View(world.start)
            self._trace: list[str] = []
            self._has_failed = False

        @rule(data=st.data(), kind=st.sampled_from(sorted(world.moves)))
        def move(self, data: Any, kind: str) -> None:
            possible = [move for move in moves(world, self._view) if move.kind == kind]
            if possible:
                number = data.draw(st.integers(0, len(possible) - 1))
                self._make(possible[number])

        def teardown(self) -> None:
            """Check that after every walk, fair moves end all requests."""
            seen: set[bytes] = set()
            while not (self._has_failed or is_done(world, self._view)):
                if self._view.snapshot in seen or len(seen) > _MOST_ROUNDS:
                    raise ViolationError("progress", "nothing leads to the end", self._trace)
                seen.add(self._view.snapshot)
                for move in [move for move in moves(world, self._view) if move.is_fair]:
                    self._make(move)

        def _make(self, move: Move) -> None:
            self._trace.append(move.text)
            outcome = server.step(self._view.snapshot, move)
            has_changed = outcome.after != self._view.snapshot
            changes[move.kind] += has_changed
            after = View(outcome.after) if has_changed else self._view
            problems = [
                (invariant.__name__, problem)
                for invariant in ALL_INVARIANTS.states
                for problem in invariant(world, after)
            ]
            problems += ALL_INVARIANTS.of_step(Step(world, self._view, move, outcome, after))
            for name, problem in problems:
                self._has_failed = True
                raise ViolationError(name, problem, self._trace)
            self._view = after

    return Walk


NUM_STEPS = 50


def main() -> int:
    """Explore, walk or replay. Returns the exit code: 1 if a trace is refused, 2 if a file is no
    trace."""
    parser = argparse.ArgumentParser(prog="python -m tests states", description=__doc__)
    parser.add_argument("--worlds", default="", help="only worlds whose names contain this")
    parser.add_argument("--walks", type=int, default=2000, help="number of walks (2000)")
    parser.add_argument("--replay", type=Path, help="replay a trace of simulate or chaos instead")
    parser.add_argument(
        "--server", choices=PROGRAMS, default=PROGRAMS[0], help="server of the replay (%(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=1, help="check invariants at each n-th call of a trace"
    )
    options = parser.parse_args()
    worlds = {name: each for name, each in (SMALL | LARGE).items() if options.worlds in name}
    if not worlds:
        parser.error(f"--worlds: no world has {options.worlds!r} in its name")
    for name, least in (("walks", 0), ("every", 1)):
        if (number := getattr(options, name)) < least:
            parser.error(f"--{name}: {number} is below {least}")
    if options.replay:
        from tests.programs.traces.replay import run_replay  # which imports this module

        return run_replay(options.replay, options.server, options.every)
    with EmbeddedServer() as server:
        drop_password(server.url)
        print(f"{'states':>9} {'moves':>10} {'deepest':>8} {'seconds':>8}  world", flush=True)
        for name, world in worlds.items():
            seen = explore(world, server.port)
            print(
                f"{seen.states:>9,} {seen.moves:>10,} {seen.deepest:>8} {seen.seconds:>8.1f}"
                f"  {name}",
                flush=True,
            )
        if options.walks:
            started = time.monotonic()
            walk(WALKED, server.port, options.walks, NUM_STEPS)
            seconds = time.monotonic() - started
            print(f"{options.walks} random walks of up to {NUM_STEPS} moves, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
