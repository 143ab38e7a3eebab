"""All invariants, or some of them, as an exploration or a walk checks them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.programs.states.invariants.claims import CLAIM_INVARIANTS
from tests.programs.states.invariants.states import STATE_INVARIANTS, StateInvariant
from tests.programs.states.invariants.steps import (
    ANSWER_INVARIANTS,
    CHANGE_INVARIANTS,
    Step,
    StepInvariant,
)
from tests.programs.states.invariants.upkeep import UPKEEP_INVARIANTS

_ANSWERS = ANSWER_INVARIANTS + CLAIM_INVARIANTS + UPKEEP_INVARIANTS


@dataclass(frozen=True)
class Invariants:
    """Those to be checked; `progress` is about all states together."""

    states: Collection[StateInvariant] = STATE_INVARIANTS
    changes: Collection[StepInvariant] = CHANGE_INVARIANTS
    answers: Collection[StepInvariant] = _ANSWERS
    progress: bool = True

    @classmethod
    def only(cls, name: str) -> Invariants:
        """The one of this name."""
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
        """Names of what does not hold of a move, each with what is wrong."""
        has_changed = step.before is not step.after or step.outcome.heard
        for invariants in (self.changes if has_changed else (), self.answers):
            for invariant in invariants:
                for problem in invariant(step):
                    yield invariant.__name__, problem


ALL_INVARIANTS = Invariants()
