"""The JSON types that a schema allows, and the targets of its references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_OF_VALUES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip
_EITHER = ("anyOf", "oneOf")
_MOST_NAMES = 16  # JSON Schema has only seven types


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Returns the names of the JSON types that a schema allows; empty if they cannot be determined.

    Looks up references in `root`. Follows each reference once, so circular references do not loop.
    """
    found = set[str]()
    followed = set[str]()
    left = [schema]
    while left:
        item = left.pop()
        if not isinstance(item, Mapping):
            return frozenset()
        kind = item.get("type")
        kinds = [kind] if isinstance(kind, str) else kind
        branches = next((each for each in map(item.get, _EITHER) if each), None)
        values = [item["const"]] if "const" in item else item.get("enum")
        if isinstance(kinds, list):
            names = {name for name in kinds[:_MOST_NAMES] if isinstance(name, str)}
        elif isinstance(reference := item.get("$ref"), str):
            if reference not in followed:
                followed.add(reference)
                left.append(target_of(reference, root))
            continue
        elif isinstance(branches, list):
            left += branches
            continue
        elif isinstance(values, list):
            names = {_OF_VALUES[type(value)] for value in values if type(value) in _OF_VALUES}
        else:
            names = set()
        if not names:
            return frozenset()
        found |= names
    return frozenset(found)


def steps_of(reference: str, root: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields each step of the path in a reference, such as `#/$defs/a`: the container, the key, and
    the key's value. A key that does not exist is the last step, with the value None."""
    item = root
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        key: Any = name.replace("~1", "/").replace("~0", "~")
        if isinstance(item, list) and key.isdecimal() and int(key[:9]) < len(item):
            key = int(key[:9])
        elif not (isinstance(item, Mapping) and key in item):
            yield item, key, None
            return
        yield item, key, item[key]
        item = item[key]


def target_of(reference: Any, root: Any) -> Any:
    """Returns the part of a schema to which a reference points; None if there is no such part."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    return [root, *(value for _, _, value in steps_of(reference, root))][-1]
