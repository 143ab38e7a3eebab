"""Finds marks in a model's text. White space in a mark does not count."""

from __future__ import annotations


def squeezed(text: str) -> str:
    """Returns the text without white space."""
    return "".join(text.split())


def without(text: str, mark: str) -> str:
    """Returns the text before the mark at its end, whose white space does not count."""
    for letter in reversed(squeezed(mark)):
        text = text.rstrip().removesuffix(letter)
    return text.strip()


def overlap(text: str, mark: str) -> int:
    """The number of letters at the end of a text that may begin a mark."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
