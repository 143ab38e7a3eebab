"""The schema of `trying` as a class, and its tool as a function. Needs pydantic."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Tale(BaseModel):
    """A tale."""

    hero: Literal["fox", "hare", "owl"]
    friends: Literal[1, 2, 3]


painted: list[Any] = []
"""The arguments of all calls of `paint`."""


def paint(hero: Literal["fox", "hare", "owl"], friends: Literal[1, 2, 3]) -> str:
    """Paint a hero."""
    painted.append({"hero": hero, "friends": friends})
    return f"{friends} {hero}"
