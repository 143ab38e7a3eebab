"""Writes texts as terms of a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

MAX_GRAMMAR_CHARS = 2**18
"""The most characters that a grammar may have."""


@lru_cache(maxsize=4)
def any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the names, longest first. It is a group, so that
    `re.split` keeps the names."""
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"({any_name})" if names else "((?!))")


def terms(text: str, added_tokens: Mapping[str, int]) -> str:
    """Returns the text as terms of a Lark grammar. Each added token is written by its id, because
    its letters would match only other tokens."""
    pieces = any_of(tuple(added_tokens)).split(text)
    return " ".join(
        f"<[{added_tokens[piece]}]>" if piece in added_tokens else json.dumps(piece)
        for piece in pieces
        if piece
    )
