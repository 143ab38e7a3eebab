"""Removes keywords without effect, and replaces some keywords that llguidance does not support."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from math import inf, nan
from typing import Any

from promptq.shared.protocol.schema_types import steps_of, target_of
from promptq.worker.text.grammars.closed_schemas import rebuilt
from promptq.worker.text.grammars.disjoint_schemas import Disjointness, kinds_of
from promptq.worker.text.grammars.lookaheads import without_lookaheads
from promptq.worker.text.grammars.references import all_objects, all_references, with_pointers

_CONSTRAINTS = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties"),
        *("allOf", "anyOf", "const", "contains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"),
        *("if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum"),
        *("minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not"),
        *("oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames"),
        *("required", "then", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
)
_STRUCTURE = frozenset(
    {"$anchor", "$defs", "$id", "$schema", "$vocabulary", "definitions", "id", "x-guidance"}
)
_APPLICATORS = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependencies"),
        *("dependentSchemas", "else", "if", "not", "oneOf", "then"),
    }
)
"""Keywords whose schemas may name further properties or items of the same value."""
_MAX_REFERENCES = 8
_HINTS = frozenset(
    {
        *("binary", "byte", "directory-path", "file-path", "multi-line", "password", "path"),
        *("double", "float", "int32", "int64", "textarea"),
    }
)
"""Formats without a constraint on the text: for display or for numbers."""
_STANDARD_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname"),
        *("ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "regex"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
"""Formats of JSON Schema. A format that is not in this set has no effect next to a `pattern`: the
format is only the pattern's name, as in zod."""


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema, changed so that it has fewer of the keywords that llguidance refuses.
    Each value that matches the result also matches `schema`. A `oneOf` whose schemas exclude each
    other becomes an `anyOf`."""
    root = _with_discriminators(with_pointers(schema))
    result: dict[str, Any] | bool = _Plain(root).of(root)
    return result if isinstance(result, dict) else {"enum": []}


class _Plain:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._disjointness = Disjointness(root)
        self._referred_to = {
            (id(container), key)
            for reference in all_references(root)
            for container, key, _ in steps_of(reference, root)
        }

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        result = rebuilt(schema, lambda child, _: self.of(child))
        if "propertyNames" in schema:
            result["propertyNames"] = self._resolved(schema["propertyNames"])
        idle = _idle(result)
        if "not" in schema and self._disjointness.of_all([_without(schema, "not"), schema["not"]]):
            idle.append("not")
        for name in idle:
            if (id(schema), name) not in self._referred_to:
                result.pop(name, None)
        branches = schema.get("oneOf")
        if (
            isinstance(branches, list)
            and branches
            and "anyOf" not in schema
            and (id(schema), "oneOf") not in self._referred_to
            and self._disjointness.of_all(branches)
        ):
            result["anyOf"] = result.pop("oneOf")
        is_used = any((id(schema), key) in self._referred_to for key in schema)
        if not is_used and _accepts_none(self._resolved(result)):
            return False
        return _rewritten(result)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or _CONSTRAINTS & schema.keys() != {"$ref"}:
                break
            schema = target_of(schema["$ref"], self._root)
        return schema


def _with_discriminators(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema, changed so that each schema in a `oneOf` requires the property that the
    `discriminator` names. pydantic's schemas do not require a property that has a default."""
    if not any("discriminator" in node and "oneOf" in node for node in all_objects(schema)):
        return schema
    schema = deepcopy(schema)
    for node in [*all_objects(schema)]:
        named, branches = node.get("discriminator"), node.get("oneOf")
        name = named.get("propertyName") if isinstance(named, dict) else None
        for branch in branches if isinstance(branches, list) and isinstance(name, str) else ():
            reference = branch.get("$ref") if isinstance(branch, dict) else None
            target = branch if reference is None else target_of(reference, schema)
            properties = target.get("properties") if isinstance(target, dict) else None
            if isinstance(properties, dict) and name in properties:
                required = target.setdefault("required", [])
                if isinstance(required, list) and name not in required:
                    required.append(name)
    return schema


def _accepts_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not _CONSTRAINTS & schema.keys())


def _accepts_none(schema: Any) -> bool:
    if schema is False:
        return True
    return isinstance(schema, dict) and "not" in schema and _accepts_all(schema["not"])


def _accepts_texts(schema: Any) -> bool:
    """Whether the schema allows every string, and so has no effect as `propertyNames`."""
    if isinstance(schema, dict) and schema.get("type", "string") in ("string", ["string"]):
        no_limit = ["minLength"] * _is_zero(schema.get("minLength"))
        schema = _without(schema, "type", *no_limit)
    return _accepts_all(schema)


def _is_zero(value: Any) -> bool:
    return value == 0 and value is not False


def _needs_nothing(dependency: Any) -> bool:
    return dependency == [] or _accepts_all(dependency)


def _are_required(dependencies: Any, required: list[Any]) -> bool:
    """Whether `required` contains all properties that `dependencies` can require."""
    known = {name for name in required if isinstance(name, str)}
    return isinstance(dependencies, dict) and all(
        isinstance(names, list)
        and all(isinstance(name, str) and (name == own or name in known) for name in names)
        for own, names in dependencies.items()
    )


def _all(is_idle: Callable[[Any], bool], values: Any) -> bool:
    if isinstance(values, dict):
        values = list(values.values())
    return isinstance(values, list) and all(map(is_idle, values))


_IDLE_VALUES: dict[str, Callable[[Any], bool]] = {
    "allOf": partial(_all, _accepts_all),
    "dependencies": partial(_all, _needs_nothing),
    "dependentRequired": partial(_all, _needs_nothing),
    "dependentSchemas": partial(_all, _accepts_all),
    "minItems": _is_zero,
    "minLength": _is_zero,
    "minProperties": _is_zero,
    "not": _accepts_none,
    "patternProperties": lambda value: value == {},
    "propertyNames": _accepts_texts,
    "required": lambda value: value == [],
    "unevaluatedItems": _accepts_all,
    "unevaluatedProperties": _accepts_all,
    "uniqueItems": lambda value: value is False,
}
"""Maps a keyword to a test of its value: True if the value never adds a constraint, whatever other
keywords the schema has."""
_OF_KIND = {
    "array": ("contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"),
    "object": (
        *("dependencies", "dependentRequired", "dependentSchemas", "maxProperties"),
        *("minProperties", "propertyNames", "unevaluatedProperties"),
    ),
}
"""For each type: keywords that constrain only values of that type."""


def _idle(schema: dict[str, Any]) -> list[str]:
    """Returns the keywords that add no constraint. Child schemas must be results of `_Plain.of`."""
    keywords = [*schema.keys() - _CONSTRAINTS - _STRUCTURE]  # refused beside a `$ref`
    keywords += [
        name for name, is_idle in _IDLE_VALUES.items() if name in schema and is_idle(schema[name])
    ]
    kinds = kinds_of(schema)
    for kind, names in _OF_KIND.items():
        keywords += names if kind not in kinds else ()
    if "contains" not in schema:
        keywords += ["minContains", "maxContains"]
    elif _count(schema, "minContains") == 0 and "maxContains" not in schema:
        keywords += ["contains", "minContains"]
    condition = schema.get("if")
    never = "else" if _accepts_all(condition) else "then" if _accepts_none(condition) else ""
    outcomes = [name for name in ("then", "else") if name in schema]
    if "if" not in schema or all(name == never or _accepts_all(schema[name]) for name in outcomes):
        keywords += ["if", *outcomes]
    form = schema.get("format")
    if isinstance(form, str) and (
        form in _HINTS or (isinstance(schema.get("pattern"), str) and form not in _STANDARD_FORMATS)
    ):
        keywords.append("format")
    named, required = schema.get("properties"), schema.get("required")
    for name in ("dependencies", "dependentRequired"):
        if isinstance(required, list) and _are_required(schema.get(name), required):
            keywords.append(name)
    if isinstance(required, list) and _count(schema, "minProperties") <= len({*map(str, required)}):
        keywords.append("minProperties")
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if is_closed and isinstance(named, dict) and _count(schema, "maxProperties") >= len(named):
        keywords.append("maxProperties")
    if _count(schema, "maxItems", 2) <= 1:
        keywords.append("uniqueItems")
    return keywords


def _rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with some keywords replaced by others that llguidance supports."""
    pattern, members = schema.get("pattern"), schema.get("allOf", [])
    if isinstance(pattern, str) and isinstance(members, list):
        first, *others = without_lookaheads(pattern) or [pattern]
        if others:
            members = [*members, *({"pattern": other} for other in others)]
            schema = {**schema, "pattern": first, "allOf": members}
    if "contains" in schema and _accepts_all(schema["contains"]):
        at_least = max(_count(schema, "minItems", 0), _count(schema, "minContains", 1))
        at_most = min(_count(schema, "maxItems", inf), _count(schema, "maxContains", inf))
        limits = {"minItems": at_least} | ({"maxItems": at_most} if at_most < inf else {})
        schema = {**_without(schema, "contains", "minContains", "maxContains"), **limits}
    names = schema.get("propertyNames")
    if isinstance(names, dict) and not schema.keys() & {"properties", "patternProperties"}:
        constraints = {key: value for key, value in names.items() if key in _CONSTRAINTS - {"type"}}
        value = schema.get("additionalProperties", True)
        listed = constraints.get("enum", [constraints["const"]] if "const" in constraints else None)
        closed = {**_without(schema, "propertyNames"), "additionalProperties": False}
        if len(constraints) == 1 and isinstance(listed, list):
            texts = [name for name in listed if isinstance(name, str)]
            schema = {**closed, "properties": dict.fromkeys(texts, value)}
        elif constraints.keys() == {"pattern"} and isinstance(constraints["pattern"], str):
            schema = {**closed, "patternProperties": {constraints["pattern"]: value}}
    if not _APPLICATORS & schema.keys():
        for rest, known in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if rest in schema and not isinstance(schema.get(known), list):
                schema = {known: schema[rest], **_without(schema, rest)}
    return schema


def _without(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in names}


def _count(schema: dict[str, Any], name: str, default: float = nan) -> float:
    """Returns the value of a keyword if the value is a number, otherwise the default. With the
    default NaN, each comparison is false."""
    value = schema.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
