"""Resolves references inside a schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urljoin

from promptq.worker.text.grammars.closed_schemas import below, children, rebuilt

_ANCHORS = ("$anchor", "$dynamicAnchor")
_NAMES = frozenset({*_ANCHORS, "$id", "$recursiveAnchor"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_RESOLVED = _NAMES.union(_REFERENCES[1:])


def with_pointers(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with all references as JSON pointers, and without `$id` and anchors.

    References to other documents, and dynamic references with several targets, do not change.
    """
    if all(_RESOLVED.isdisjoint(node) for node in all_objects(schema)):
        return schema
    places: dict[tuple[str, str], str] = {}
    """JSON pointers of schemas, by (address, anchor). A whole document has an empty anchor."""
    dynamic: Counter[str] = Counter()
    for node, path, base in _placed(schema, "#", ""):
        _, _, former = _text(node, "$id").partition("#")  # draft 7 has anchors there
        for anchor in ("", former, *(_text(node, name) for name in _ANCHORS)):
            places.setdefault((base, anchor), path)
        dynamic[_text(node, "$dynamicAnchor")] += "$dynamicAnchor" in node
        dynamic[""] += node.get("$recursiveAnchor") is True

    def pointer(reference: str, base: str) -> str | None:
        address, _, fragment = reference.partition("#")
        is_pointer = fragment.startswith("/")
        place = places.get((_joined(base, address), "" if is_pointer else unquote(fragment)))
        return None if place is None else "#" + quote(place[1:], "/~$") + fragment * is_pointer

    def rewritten(node: Any, base: str) -> Any:
        if not isinstance(node, dict):
            return node
        base = _joined(base, _text(node, "$id"))
        result = rebuilt(node, lambda child, _: rewritten(child, base))
        for name in _REFERENCES:
            reference = node.get(name)
            if not isinstance(reference, str) or ("$ref" in node and name != "$ref"):
                continue
            is_certain = name == "$ref" or dynamic[unquote(reference.partition("#")[2])] < 2
            if is_certain and (target := pointer(reference, base)):
                del result[name]
                result["$ref"] = target
        return {name: value for name, value in result.items() if name not in _NAMES}

    result: dict[str, Any] = rewritten(schema, "")
    return result


def _placed(schema: Any, path: str, base: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields each schema inside `schema`, its path, and the address (`$id`) of its document."""
    if isinstance(schema, dict):
        base = _joined(base, _text(schema, "$id"))
        yield schema, path, base
        for keys, child, _ in children(schema):
            yield from _placed(child, below(path, keys), base)


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address.partition("#")[0]) or base
    except ValueError:
        return address


def _text(schema: dict[str, Any], name: str) -> str:
    value = schema.get(name)
    return value if isinstance(value, str) else ""


def all_objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields each JSON object in a schema, at all depths."""
    left = [schema]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item.values()
            yield item


def all_references(schema: Any) -> set[str]:
    """Returns all values of `$ref` in a schema."""
    references = (item.get("$ref") for item in all_objects(schema))
    return {reference for reference in references if isinstance(reference, str)}
