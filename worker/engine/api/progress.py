"""How the start of an engine reports its progress."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is called in each stage of a start, such as the weights and the check."""

    def __call__(self, stage: str, share: float | None = None) -> object:
        """Report that `stage` goes on, and that the stage before it is over.

        `share` is how much of the stage is done, from 0 to 1; None if that is unknown.
        """
        ...


def unheard(stage: str, share: float | None = None) -> None:
    """A Progress that does nothing."""
