"""Schemas count as closed, wherever that takes nothing away that they name."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from promptq.worker.text.grammars import closed_schemas
from promptq.worker.text.grammars.closed_schemas import closed

A: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: Any = {"type": "object", "properties": {"b": {"type": "integer"}}}


def shut(schema: Any) -> Any:
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, shut(A)),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": B}, {**A, "additionalProperties": shut(B)}),
        ({"properties": {"x": A}}, shut({"properties": {"x": shut(A)}})),
        ({"items": A}, {"items": shut(A)}),
        ({"prefixItems": [A, B]}, {"prefixItems": [shut(A), shut(B)]}),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [shut(A), shut(B), {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": shut(A)}, "$ref": "#/$defs/x"}),
        ({"allOf": [A]}, {"allOf": [shut(A)]}),
        ({"properties": {"properties": A}}, shut({"properties": {"properties": shut(A)}})),
        ({**A, "required": ["c"]}, {**A, "required": ["c"]}),
    ],
)
def test_objects_are_closed_at_all_depths(schema: Any, expected: Any) -> None:
    given = repr(schema)
    assert closed(schema) == expected
    assert repr(schema) == given, "the request keeps what its client sent"


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "anyOf": [B]},
        {"required": ["b"], "anyOf": [A, B]},
        {"anyOf": [{"oneOf": [A]}], "oneOf": [B]},
        {**A, "$ref": "#/$defs/x", "$defs": {"x": B}},
        {"allOf": [{"$ref": "#/$defs/x"}, A], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": B}},
        {"allOf": [{"$ref": "#/$defs/x~1y%20"}, A], "$defs": {"x/y ": B}},
        {"if": A, "then": B},
        {"not": A},
    ],
)
def test_what_other_schemas_add_to_stays_open(schema: Any) -> None:
    """Closed, it would refuse what they name."""
    assert closed(schema) == schema


def test_the_work_grows_with_the_schema_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of references made it grow with the square, in front of all other requests."""

    def steps(length: int) -> int:
        links = {f"d{n}": {"$ref": f"#/$defs/d{n - 1}"} for n in range(1, length)}
        schema = {"$defs": {"d0": A, **links}, "allOf": [{"$ref": f"#/$defs/d{length - 1}"}, B]}
        looked_at = []
        children = closed_schemas.children
        with monkeypatch.context() as patched:
            patched.setattr(
                closed_schemas, "children", lambda it: looked_at.append(1) or children(it)
            )
            assert closed(schema) == schema
        return len(looked_at)

    assert steps(200) < 2.1 * steps(100)


def test_only_what_a_part_describes_stays_open() -> None:
    schema = {"allOf": [{"properties": {"x": A}}, B]}
    expected = {"allOf": [{"properties": {"x": shut(A)}}, B]}
    assert closed(schema) == expected
    jsonschema.validate({"x": {"a": 1}, "b": 2}, closed(schema))
