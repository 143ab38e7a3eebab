"""JSON in small parts is read and written as the library does it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from promptq.shared.runtime.large_json import object_in, written
from promptq.shared.runtime.turns import at_once


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3, 40)))]
    if kind == 6:
        return {f"n{n} ]}},": value(draw, depth + 1) for n in range(draw.randrange(4))}
    return (None, True, draw.randrange(-(10**20), 10**20), draw.random(), 'a "b], c\\')[kind]


def test_objects_are_read_and_written_as_by_the_library(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        fields = {f"f{n}": value(draw) for n in range(draw.randrange(5))}
        for text in (json.dumps(fields), json.dumps(fields, indent=draw.choice((1, "\t")))):
            assert at_once(object_in(text, {})) == fields
            at = draw.randrange(len(text) - 1)
            cut = text[:at] + text[at + draw.randrange(1, 3) :]
            try:
                expected = json.loads(cut)
            except ValueError:
                expected = None
            try:
                found = at_once(object_in(cut, {}))
            except ValueError:
                found = None
            assert found == (expected if isinstance(expected, dict) else None), cut
        assert json.loads(at_once(written(fields))) == json.loads(text)


def test_whole_characters_may_be_escaped() -> None:
    text = r'{"a":"\ud83e\udd8a","b":["\\ud800"]}'
    assert at_once(object_in(text, {})) == {"a": "\U0001f98a", "b": [r"\ud800"]}


def test_items_of_a_list_are_converted_one_by_one() -> None:
    parts = object_in(' { "a" : [ 1 , 2 ] , "b" : [ 3 ] , "c" : [ ] } ', {"a": str})
    assert next(parts) is None
    assert at_once(parts) == {"a": ["1", "2"], "b": [3], "c": []}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a":[1,]}', "Expecting value"),
        ('{"a":[1 2]}', "no ',' or ']'"),
        ('{"a":[1}', "no ',' or ']'"),
        ('{"a":[NaN]}', "NaN is not JSON"),
        ("[]", "no '{'"),
        ('{"a":"\\ud800"}', "surrogates"),
        ('{"a":[{"b":["\\udFFF"]}]}', "surrogates"),
        ('{"\\uDbff":1}', "surrogates"),
    ],
)
def test_what_is_no_object_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        at_once(object_in(text, {}))
