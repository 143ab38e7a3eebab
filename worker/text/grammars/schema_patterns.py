"""Counts the patterns of a schema that may all apply to the same value.

For n such patterns, llguidance needs time in proportion to 2^n, either when it compiles the schema
or in a later step of the engine. So the worker checks this number first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from promptq.worker.text.grammars.references import all_objects

MAX_COMBINED_PATTERNS = 12
"""The largest result of `num_combined_patterns` that the worker accepts. With 12 patterns, the mask
of a token takes 13 ms."""

_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions"),
        *("deprecated", "description", "discriminator", "examples", "readOnly", "title"),
        *("writeOnly", "x-guidance"),
    }
)
"""Keywords that do not constrain the value itself."""


def num_combined_patterns(schema: Mapping[str, Any]) -> int:
    """Returns an upper bound of the number of different patterns that may all apply to the same
    value; 0 if the schema combines no patterns.

    If the schema combines any patterns, all of its patterns count, because an exact count would
    have to follow all references. A property with the name of a keyword may count as that keyword.
    """
    patterns: set[tuple[str, str]] = set()
    combines = False
    for item in all_objects(schema):
        for key in ("pattern", "multipleOf"):
            if isinstance(item.get(key), str | int | float):
                patterns.add((key, str(item[key])))
        if isinstance(names := item.get("patternProperties"), dict):
            patterns.update(("pattern", name) for name in names)
            combines = True
        combines = combines or _combines(item)
    return len(patterns) if combines else 0


def num_patterns_of_lark(grammar: str) -> int:
    """Returns an upper bound of how many patterns may apply to the same text. Counts patterns of
    intersections (`&`) in a Lark grammar, and patterns in the grammar's JSON schemas."""
    count = 0
    for match in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError):  # no JSON: llguidance refuses it, or `%json` stands in a string
            schema, _ = json.JSONDecoder().raw_decode(grammar, match.end())
            count += num_combined_patterns({"schema": schema})
    num_intersections = _LARK_TEXT.sub("", grammar).count("&")
    return count + (num_intersections + 1 if num_intersections else 0)


_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
"""Matches the strings, comments and regular expressions of a Lark grammar."""


def _combines(schema: dict[str, Any]) -> bool:
    """Whether a schema sets several constraints on one value, some of them by other schemas."""
    constraints = schema.keys() - ANNOTATIONS
    members = schema.get("allOf")
    if isinstance(members, list) and len(members) > 1:
        return True
    return len(constraints) > 1 and not constraints.isdisjoint(_COMBINING)
