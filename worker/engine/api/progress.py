"""How an engine's start tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears of each stage of a start: the weights, the check, whatever else takes its time."""

    def __call__(self, stage: str, share: float | None = None) -> object:
        """`stage` goes on, and the one before it is over.

        `share` is how much of it is done, from 0 to 1; None where nobody can know.
        """
        ...


def unheard(stage: str, share: float | None = None) -> None:
    """The Progress of those who do not want to know."""
