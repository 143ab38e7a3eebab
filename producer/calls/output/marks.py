"""Finds marks, such as `<think>`, in a model's text."""

from __future__ import annotations


def squeezed(text: str) -> str:
    """Returns the text without its white space."""
    return "".join(text.split())


def without(text: str, mark: str) -> str:
    """Removes `mark` from the end of the text, and white space from both ends. White space between
    the letters of the mark does not matter."""
    for letter in reversed(squeezed(mark)):
        text = text.rstrip().removesuffix(letter)
    return text.strip()


def overlap(text: str, mark: str) -> int:
    """Returns how many last characters of `text` may begin `mark`: 3 for "Hi <th" and `<think>`."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
