"""Counts phrases that read as translated. A count may only fall: lower its limit with it."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from typing import Any

from tests.docs.test_links import CODE, PAGES
from tests.support.paths import ROOT

FIRST_WORDS = ("The same", "What", "As", "Those", "Who", "Gives", "It")
PHRASES = {
    "told": re.compile(r"\btold\b"),
    "of its own": re.compile(r"\bof (?:its|their|our) own\b"),
    "any more": re.compile(r"\bany more\b"),
    "so many": re.compile(r"\bso many\b"),
}
LIMITS = {
    "told, in code": 2,  # a JSON field and a log key
    "words of docs": 28959,  # without the lines of tables and other signs
}
"""Every other count is 0."""


def docstrings(tree: ast.Module) -> list[str]:
    """Returns docstrings of modules, classes and functions, and strings below names."""
    statements: list[Any] = [*tree.body]
    found = []
    for node in statements:  # to look at expressions too would take five times as long
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, part, ())
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(node.value.value)
    return [each for each in found if isinstance(each, str)]


def found() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in CODE:
        text = path.read_text()
        is_product = path.relative_to(ROOT).parts[0] in ("producer", "shared", "worker")
        if is_product:
            for name, phrase in PHRASES.items():
                counts[f"{name}, in code"] += len(phrase.findall(text))
        if path.suffix != ".py":
            continue
        tree = ast.parse(text)
        for docstring, word in itertools.product(docstrings(tree), FIRST_WORDS):
            counts[f"docstrings that begin with {word}"] += docstring.startswith(f"{word} ")
        if is_product:
            counts["variables called it"] += sum(
                isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "it"
                for node in ast.walk(tree)
            )
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            text = page.read_text()
            for name, phrase in PHRASES.items():
                counts[f"{name}, in docs"] += len(phrase.findall(text))
            counts["words of docs"] += sum(any(map(str.isalnum, word)) for word in text.split())
    return counts


def test_counts_only_fall() -> None:
    above = {name: count for name, count in found().items() if count > LIMITS.get(name, 0)}
    assert not above, f"above the limits: {above}"
