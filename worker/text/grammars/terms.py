"""Writes texts as terms of a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from reprlib import repr as shown

MAX_GRAMMAR_CHARS = 2**18
"""The most characters that a grammar may have."""


@lru_cache(maxsize=4)
def any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the names, longest first. The pattern is a group, so
    that `re.split` keeps the names."""
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"({any_name})" if names else "((?!))")


def terms(text: str, added_tokens: Mapping[str, int]) -> str:
    """Returns the text as terms of a Lark grammar. Each added token in the text becomes a term with
    the token's id, because a term with letters would match only ordinary tokens."""
    pieces = any_of(tuple(added_tokens)).split(text)
    return " ".join(
        f"<[{added_tokens[piece]}]>" if piece in added_tokens else json.dumps(piece)
        for piece in pieces
        if piece
    )


def choice_grammar(
    texts: Sequence[str], added_tokens: Mapping[str, int], special_tokens: Collection[str]
) -> str:
    """Returns a Lark grammar that accepts one of the texts. All texts without added tokens share
    one terminal, because a rule for each text would make masks slow.

    Raises ValueError if a text contains a special token, because outputs never show these tokens.
    """
    added = any_of(tuple(added_tokens))
    letters: list[str] = []
    others: list[str] = []
    for text in dict.fromkeys(texts):
        if not (held := added.findall(text)):
            letters.append(json.dumps(text))
            continue
        for name in held:
            if name in special_tokens:
                raise ValueError(
                    f"{shown(text)} holds {name}, a special token, which is never in a text"
                )
        others.append(terms(text, added_tokens))
    if not letters:
        return f"%llguidance {{}}\nstart: {' | '.join(others)}"
    start = " | ".join(["TEXT", *others])
    return f"%llguidance {{}}\nstart: {start}\nTEXT: {' | '.join(letters)}"
