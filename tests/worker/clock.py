"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Says `now`, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
