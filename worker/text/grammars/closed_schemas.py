"""Closes schemas: objects may have only the properties that the schema names.

Most authors expect their schemas to be closed. Other functions list or replace child schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

_SCHEMA = ("items", "contains", "additionalProperties", "additionalItems", "propertyNames")
_BRANCH = ("if", "then", "else", "not")
_BRANCHES = ("anyOf", "oneOf", "allOf")
_LISTS = ("prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COMBINING = frozenset((*_BRANCH, *_BRANCHES, "$ref", "dependentSchemas", "unevaluatedProperties"))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the schema in which all objects allow only properties that they name.

    References must be JSON pointers. Objects with `additionalProperties` do not change. Neither do
    objects to which another schema, such as a branch of `allOf`, may add properties.
    """
    result: dict[str, Any] = _closed(schema, "#", _parts(schema))
    return result


def _parts(schema: dict[str, Any]) -> set[str]:
    """Returns the paths of schemas that apply to one value together with another schema."""
    schemas = dict(_by_path(schema, "#"))
    pending = [
        other
        for path, schema in schemas.items()
        if _combines(schema)
        for other in _described_with(schema, path)
    ]
    parts = set[str]()
    while pending:
        path = pending.pop()
        if path not in parts:
            parts.add(path)
            if path in schemas:
                pending += _described_with(schemas[path], path)
    return parts


def _by_path(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield path, schema
        for keys, child, _ in children(schema):
            yield from _by_path(child, below(path, keys))


def _described_with(schema: dict[str, Any], path: str) -> list[str]:
    """Returns the paths of the branches and of the `$ref` target of `schema`, which apply to the
    same value as `schema`. `path` is the path of `schema`."""
    paths = [below(path, keys) for keys, _, is_branch in children(schema) if is_branch]
    if isinstance(reference := schema.get("$ref"), str):
        paths.append(unquote(reference).rstrip("/"))
    return paths


def _closed(schema: Any, path: str, parts: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = rebuilt(schema, lambda child, keys: _closed(child, below(path, keys), parts))
    if _names_all(schema) and path not in parts and not _COMBINING & schema.keys():
        result.setdefault("additionalProperties", False)
    return result


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether the schema has `properties`, and these include all required names."""
    named, required = schema.get("properties"), schema.get("required")
    names = required if isinstance(required, list) else []
    return isinstance(named, dict) and all(isinstance(key, str) and key in named for key in names)


def below(path: str, keys: tuple[Any, ...]) -> str:
    """Returns the path of a child schema as a JSON pointer, such as `#/properties/name`."""
    escaped = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return "/".join((path, *escaped))


def children(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """Yields (keys, child, is_branch) for each direct child schema. A branch, such as an item of
    `anyOf`, applies to the same value as `schema`."""
    for name in (*_SCHEMA, *_BRANCH):
        if isinstance(child := schema.get(name), dict):
            yield (name,), child, name in _BRANCH
    for name in (*_BRANCHES, *_LISTS):
        if isinstance(children := schema.get(name), list):
            for index, child in enumerate(children):
                yield (name, index), child, name in _BRANCHES
    for name in (*_NAMED, "dependentSchemas"):
        if isinstance(named := schema.get(name), dict):
            for key, child in named.items():
                yield (name, key), child, name == "dependentSchemas"


def rebuilt(
    schema: dict[str, Any], change: Callable[[Any, tuple[Any, ...]], Any]
) -> dict[str, Any]:
    """Returns a copy of the schema in which `change(child, keys)` replaces each direct child."""
    result = dict(schema)
    for keys, child, _ in children(schema):
        value = change(child, keys)
        first, *rest = keys
        if not rest:
            result[first] = value
            continue
        if result[first] is schema[first]:
            result[first] = schema[first].copy()
        result[first][rest[0]] = value
    return result


def _combines(schema: dict[str, Any]) -> bool:
    """Whether the schema has several constraints for one object, some of them in other schemas."""
    direct = {"properties", "patternProperties", "required", "dependentSchemas", *_BRANCH}
    if direct & schema.keys():
        return True
    combining = [name for name in (*_BRANCHES, "$ref") if name in schema]
    all_of = schema.get("allOf")
    return len(combining) > 1 or (isinstance(all_of, list) and len(all_of) > 1)
