"""Follows references inside a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote


def steps_of(reference: str, root: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields each step to a reference's target: a container, a key, and the value there.

    Ends early where there is no such key.
    """
    item = root
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        key: Any = name.replace("~1", "/").replace("~0", "~")
        if isinstance(item, list) and key.isdecimal() and int(key[:9]) < len(item):
            key = int(key[:9])
        elif not (isinstance(item, dict) and key in item):
            yield item, key, None
            return
        yield item, key, item[key]
        item = item[key]


def target_of(reference: Any, root: Any) -> Any:
    """Returns what a reference refers to; None if that is not in the same schema."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    return [root, *(value for _, _, value in steps_of(reference, root))][-1]


def all_objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields each object of a schema, at all depths."""
    left = [schema]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item.values()
            yield item


def all_references(schema: Any) -> set[str]:
    """Returns each `$ref` of a schema."""
    found = (item.get("$ref") for item in all_objects(schema))
    return {reference for reference in found if isinstance(reference, str)}
