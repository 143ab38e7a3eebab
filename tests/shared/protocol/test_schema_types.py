"""Types of a schema, also of hostile ones."""

from __future__ import annotations

from typing import Any

import pytest

from promptq.shared.protocol.schema_types import types_of

ITSELF = {"anyOf": [{"$ref": "#/$defs/a"}] * 50}
DOUBLED = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
        ({"const": True}, {"boolean"}),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/Zip%20Code"}]}, {"array", "string"}),
        ({"anyOf": [{"type": "array"}, {"minLength": 1}]}, set()),
        ({"$ref": "#/$defs/list/0"}, {"object"}),
        ({"$ref": "#/$defs/nowhere"}, set()),
        ({"$ref": "#/$defs/a"}, set()),
        ({"$ref": "#/$defs/d0"}, {"number"}),
        (True, set()),
    ],
)
def test_types(schema: Any, expected: set[str]) -> None:
    definitions = {"Zip Code": {"type": "string"}, "list": [{"type": "object"}], "a": ITSELF}
    root = {"$defs": {**definitions, **DOUBLED, "d60": {"type": "number"}}}
    assert types_of(schema, root) == expected
