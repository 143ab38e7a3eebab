"""The JSON types that a schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_STEPS = 16
"""References and branches that are followed, so that no schema leads in circles."""
_OF_VALUES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip


def types_of(schema: Any, root: Any, steps: int = _MOST_STEPS) -> frozenset[str]:
    """Returns the types that a schema names; none if it names none in a known way.

    `root` is the schema to whose parts references point.
    """
    if not isinstance(schema, Mapping) or not steps:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_target(reference, root), root, steps - 1)
    for either in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(either), list) and branches:
            of_each = [types_of(branch, root, steps - 1) for branch in branches]
            return frozenset[str]().union(*of_each) if all(of_each) else frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_OF_VALUES[type(value)] for value in values if type(value) in _OF_VALUES)
    return frozenset()


def _target(reference: str, root: Any) -> Any:
    """Returns what a JSON pointer names; None if that is not in the root."""
    if not reference.startswith("#"):
        return None
    for step in filter(None, reference.removeprefix("#").split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root
