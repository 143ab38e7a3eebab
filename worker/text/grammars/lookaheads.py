"""Replaces look-aheads at the beginning of a pattern, because llguidance does not support them."""

from __future__ import annotations

import re
from itertools import accumulate, groupby

_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_CHARACTER = re.compile(r"\\[dwsDWSnrt]|\\[^\w\s]|\[(?!\^?\]).*\]|[^\\\[\](){}.*+?^$|]", re.DOTALL)
"""Matches a token of a pattern that stands for exactly one character of a text."""
_LONGEST = 1000
_DEPTHS = {"(": 1, ")": -1}
_ANY = r"[\s\S]*"


def without_lookaheads(pattern: str) -> list[str] | None:
    """Returns patterns without look-aheads. A text that matches all of them also matches `pattern`,
    but a text that matches `pattern` may not match all of them. Returns None if `pattern` does not
    begin with look-aheads, or if these cannot be replaced."""
    if len(pattern) > _LONGEST or not pattern.startswith("^(?"):
        return None
    tokens = _TOKEN.findall(pattern)
    del tokens[0]
    patterns: list[str | None] = []
    while tokens[:3] in (["(", "?", "="], ["(", "?", "!"]):
        if 0 not in (depths := _depths(tokens)):
            return None
        end = depths.index(0)
        alternatives = _alternatives(tokens[3:end])
        if tokens[2] == "=":
            patterns.append(_beginning(alternatives))
        else:
            patterns += map(_not_beginning, alternatives)
        del tokens[: end + 1]
    others = [other for other in patterns if other is not None]
    if len(others) < max(len(patterns), 1) or len(_alternatives(tokens)) > 1:
        return None
    return ["^" + "".join(tokens), *others]


def _beginning(alternatives: list[list[str]]) -> str | None:
    """Returns a pattern of texts that begin with one of the alternatives; None if impossible."""
    texts = []
    for tokens in alternatives:
        is_whole = tokens[-1:] == ["$"]
        inner = tokens[:-1] if is_whole else tokens
        if {"^", "$"}.intersection(inner):
            return None
        texts.append("".join(inner) + ("" if is_whole else _ANY))
    return f"^(?:{'|'.join(texts)})$"


def _not_beginning(tokens: list[str]) -> str | None:
    """Returns a pattern of the texts that a negative look-ahead for `tokens` allows. The tokens
    must have a form such as `abc`, `abc$` or `.*aa`; otherwise returns None."""
    is_anywhere, is_whole = tokens[:2] == [".", "*"], tokens[-1:] == ["$"]
    characters = tokens[2 * is_anywhere : -1 if is_whole else None]
    if not characters or not all(map(_CHARACTER.fullmatch, characters)):
        return None
    if is_anywhere:
        if is_whole or len(list(groupby(characters))) > 1:
            return None
        few = f"{characters[0]}{{0,{len(characters) - 1}}}"
        return f"^(?:{few}{_other_than(characters[0])})*{few}$"
    pattern = ""
    for number, character in enumerate(reversed(characters)):
        after = pattern if number else "[\\s\\S]+" * is_whole
        same = f"|{character}{after}" if after else ""
        pattern = f"(?:{_other_than(character)}{_ANY}{same})?"
    return f"^{pattern}$"


def _other_than(character: str) -> str:
    if not character.startswith("["):
        return f"[^{character}]"
    return f"[{character[2:]}" if character.startswith("[^") else f"[^{character[1:]}"


def _depths(tokens: list[str]) -> list[int]:
    """Returns for each token how many groups are open after it."""
    return [*accumulate(_DEPTHS.get(token, 0) for token in tokens)]


def _alternatives(tokens: list[str]) -> list[list[str]]:
    """Splits the tokens at each `|` that is outside of all groups."""
    alternatives: list[list[str]] = [[]]
    for each, depth in zip(tokens, _depths(tokens), strict=True):
        if each == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(each)
    return alternatives
