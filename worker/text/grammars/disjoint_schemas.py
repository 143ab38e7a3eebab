"""Proves that no value matches two schemas. A `oneOf` of such schemas means the same as `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from promptq.shared.protocol.schema_types import target_of

_MAX_STEPS = 20_000
_MAX_DEPTH = 12
_KINDS = frozenset({"array", "boolean", "integer", "fraction", "null", "object", "string"})
"""The types of JSON Schema, with integers and fractions in place of numbers."""


class Disjointness:
    """Proves, in bounded time, that schemas of one document exclude each other."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._steps_left = _MAX_STEPS

    def of_all(self, schemas: Sequence[Any]) -> bool:
        """Whether no value matches two of the schemas. False if this cannot be proved."""
        return all(self._of(one, other, 0) for one, other in combinations(schemas, 2))

    def _of(self, one: Any, other: Any, depth: int) -> bool:
        self._steps_left -= 1
        if self._steps_left < 0 or depth > _MAX_DEPTH:
            return False
        if _is_never(one) or _is_never(other):
            return True
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        if self._part_of(one, other, depth + 1) or self._part_of(other, one, depth + 1):
            return True
        kinds = kinds_of(one) & kinds_of(other)
        values, others = self._values(one), self._values(other)
        if not kinds or (values is not None and others is not None and not values & others):
            return True
        return kinds == {"object"} and self._of_objects(one, other, depth + 1)

    def _part_of(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Whether the `$ref`, `allOf`, `anyOf` or `oneOf` of `one` excludes `other`."""
        parts = [target_of(one["$ref"], self._root)] if "$ref" in one else []
        parts += _list(one, "allOf")
        if any(self._of(part, other, depth) for part in parts):
            return True
        unions = [branches for name in ("anyOf", "oneOf") if (branches := _list(one, name))]
        return any(all(self._of(part, other, depth) for part in branches) for branches in unions)

    def _of_objects(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Whether two schemas exclude each other by one property: one requires the property and the
        other forbids it, or both require the property with schemas that exclude each other."""
        for first, second in ((one, other), (other, one)):
            required = [name for name in _list(first, "required") if isinstance(name, str)]
            named, others = first.get("properties"), second.get("properties", {})
            if not isinstance(others, dict):
                continue
            self._steps_left -= len(required)
            is_closed = second.get("additionalProperties") is False
            if is_closed and not second.get("patternProperties") and {*required} - others.keys():
                return True
            also_required = {name for name in _list(second, "required") if isinstance(name, str)}
            if isinstance(named, dict) and any(
                self._of(named[name], others[name], depth)
                for name in required
                if name in named and name in others and name in also_required
            ):
                return True
        return False

    def _values(self, schema: dict[str, Any]) -> set[str] | None:
        """Returns the values that a schema lists, as JSON; None for a schema without a list."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(listed, list):
            return None
        self._steps_left -= len(listed)
        return {json.dumps(_plain_numbers(value), sort_keys=True) for value in listed}


def _is_never(schema: Any) -> bool:
    return schema is False or (isinstance(schema, dict) and schema.get("not") in (True, {}))


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def kinds_of(schema: dict[str, Any]) -> frozenset[str]:
    """Returns the types of the values that a schema's `type`, `const` and `enum` allow."""
    kinds = _KINDS
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if "number" in named:
            named = [*named, "integer", "fraction"]
        kinds &= {name for name in named if isinstance(name, str)}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        kinds &= {_kind_of(value) for value in listed}
    return kinds


def _kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _plain_numbers(value: Any) -> Any:
    """Returns the JSON value with 1 in place of 1.0, because both are the same number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(member) for key, member in value.items()}
    return value
