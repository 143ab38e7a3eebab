"""Counts the patterns of a schema that one value may have to match all at once.

To match n of them costs the library 2^n, at the compiling or only when a text gets to the point,
in a step of the engine. So there is a limit that needs nothing to be tried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_COMBINED_PATTERNS = 12
"""Of a schema that combines others; 13 ms for a token then."""

_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions"),
        *("deprecated", "description", "discriminator", "examples", "readOnly", "title"),
        *("writeOnly", "x-guidance"),
    }
)
"""What constrains nothing where it stands."""


def num_combined_patterns(schema: Mapping[str, Any]) -> int:
    """How many different patterns one value may have to match, or more; 0 where none are combined.

    They are all that the schema has as soon as it combines anything: which of them can meet would
    take following all references. Names of properties may be taken for keywords.
    """
    patterns: set[tuple[str, str]] = set()
    combines = False
    left: list[Any] = [schema]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item.values()
            for key in ("pattern", "multipleOf"):
                if isinstance(item.get(key), str | int | float):
                    patterns.add((key, str(item[key])))
            if isinstance(names := item.get("patternProperties"), dict):
                patterns.update(("pattern", name) for name in names)
                combines = True
            combines = combines or _combines(item)
    return len(patterns) if combines else 0


def _combines(schema: dict[str, Any]) -> bool:
    """Whether it asks for two things of one value, at least one of them a schema elsewhere."""
    asked = schema.keys() - _ANNOTATIONS
    members = schema.get("allOf")
    if isinstance(members, list) and len(members) > 1:
        return True
    return len(asked) > 1 and not asked.isdisjoint(_COMBINING)
