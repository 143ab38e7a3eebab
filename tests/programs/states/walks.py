"""Random walks through worlds that are too large to be explored, shrunk by Hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.programs.states.calls import Move
from tests.programs.states.explore import ViolationError, is_done
from tests.programs.states.invariants.all_invariants import ALL_INVARIANTS
from tests.programs.states.invariants.steps import Step
from tests.programs.states.moves import moves
from tests.programs.states.server import StatesServer
from tests.programs.states.world import View, World

_MOST_ROUNDS = 100


def walk(
    world: World,
    port: int,
    num_walks: int,
    num_steps: int,
    texts: Mapping[str, str] | None = None,
    shortens: bool = True,
) -> None:
    """Go through the world at random, with all invariants checked at every step.

    Raises ViolationError, with the shortest walk to it that Hypothesis finds if it `shortens`, and
    with the blob that repeats it.
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
    try:
        run_state_machine_as_test(_walker(world, server), settings=options)
    finally:
        server.close()


def _walker(world: World, server: StatesServer) -> type[RuleBasedStateMachine]:
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
            """Whatever happened: what is tried again and again ends all requests."""
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
