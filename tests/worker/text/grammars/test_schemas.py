"""Schemas as clients write them: what asks for nothing, references, and where a fault is."""

from __future__ import annotations

import json
import random
import re
from enum import Enum
from itertools import product
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import JsonOutput, wanted_output
from promptq.worker.text.grammars.closed_schemas import closed
from promptq.worker.text.grammars.lookaheads import without_lookaheads
from promptq.worker.text.grammars.plain_schemas import plain
from promptq.worker.text.grammars.schema_masks import Grammars
from tests.worker.text.grammars.structured import assert_valid, json_schema
from tests.worker.text.grammars.test_grammars import END, grammars, walk

TEXT: dict[str, Any] = {"type": "string", "maxLength": 4}
LIST: dict[str, Any] = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
IDLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((LIST, it) for it in ({"uniqueItems": False}, {"minContains": 0}, {"maxContains": 3})),
    *((LIST, it) for it in ({"minContains": 2}, {"contains": {"const": 9}, "minContains": 0})),
    *((LIST, {"unevaluatedItems": it}) for it in (True, {}, {"title": "Any"})),
    *((OBJECT, {"dependentRequired": it}) for it in ({}, {"a": []})),
    *((OBJECT, {"dependentSchemas": it}) for it in ({}, {"a": True}, {"a": {}})),
    *((OBJECT, {"dependencies": it}) for it in ({}, {"a": []}, {"a": {"description": "-"}})),
    *((OBJECT, {"propertyNames": it}) for it in (True, {}, {"type": "string"})),
    *((OBJECT, it) for it in ({"unevaluatedProperties": True}, {"patternProperties": {}})),
    (OBJECT, {"minProperties": 1}),
    ({**OBJECT, "additionalProperties": False}, {"maxProperties": 1}),
    *((TEXT, {"not": it}) for it in (False, {"not": {}}, {"not": True})),
    *((TEXT, it) for it in ({"if": {"const": "a"}}, {"then": False}, {"else": {"const": 1}})),
    (TEXT, {"if": {"const": "a"}, "then": True, "else": {"$comment": "-"}}),
    *((TEXT, {"allOf": it}) for it in ([], [True], [{}, {"title": "A"}])),
    *((TEXT, {"format": it}) for it in ("password", "binary", "path", "int64")),
    *((TEXT, it) for it in ({"uniqueItems": True}, {"contains": {"const": 1}}, {"minLength": 0})),
    *((TEXT, {it: {"a": ["b"]}}) for it in ("dependentRequired", "dependencies")),
    *(
        (it, {"propertyNames": {"maxLength": 1}, "dependentSchemas": {"a": False}})
        for it in (TEXT, LIST)
    ),
    *(
        (OBJECT, it)
        for it in ({"uniqueItems": True, "contains": False}, {"propertyNames": {"minLength": 0}})
    ),
    *((OBJECT, {it: {"a": ["a"], "b": ["a"]}}) for it in ("dependentRequired", "dependencies")),
    *((OBJECT, {"not": {"type": it}}) for it in ("null", ["array", "string"])),
    (TEXT, {"not": {"enum": [1, None]}}),
    (TEXT, {"if": False, "then": False, "else": {"minLength": 0}}),
    (TEXT, {"if": {"title": "Any"}, "then": {"required": []}, "else": False}),
    *((TEXT, it) for it in ({"$dynamicAnchor": "node"}, {"$recursiveAnchor": True})),
]


def refusal(compiled: Grammars, **fields: Any) -> str:
    fields = {"response_format": None, "tools": None, "tool_choice": None, **fields}
    wanted = wanted_output(**fields)
    assert wanted is not None
    with pytest.raises(InvalidRequestError) as caught:
        compiled.start(wanted, frozenset({END}))
    assert caught.value.error_type == "unsupported"
    assert caught.value.field == ("tools" if fields["tools"] else "response_format")
    return str(caught.value)


@pytest.fixture(scope="module")
def compiled() -> Grammars:
    return grammars()


@pytest.mark.parametrize(("schema", "idle"), IDLE, ids=lambda it: json.dumps(it)[:60])
def test_what_asks_for_nothing_changes_nothing(
    schema: dict[str, Any], idle: dict[str, Any], compiled: Grammars
) -> None:
    def around(inner: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"x": {"type": "array", "items": [inner]}, "y": {"$ref": "#/$defs/z"}},
            "required": ["y"],
            "$defs": {"z": {"anyOf": [inner, {"type": "null"}]}},
        }

    for form in (lambda inner: inner, around):
        assert closed(plain(form({**schema, **idle}))) == closed(plain(form(schema)))
    for fields in (
        {"response_format": json_schema(around({**schema, **idle}))},
        {"tools": [_tool(around({**schema, **idle}))], "tool_choice": "required"},
    ):
        wanted = wanted_output(
            **{"response_format": None, "tools": None, "tool_choice": None, **fields}
        )
        assert wanted is not None
        compiled.start(wanted, frozenset({END}))


@pytest.mark.parametrize(
    ("schema", "value", "other"),
    [
        ({"uniqueItems": True}, [1], [1, 1]),
        ({"contains": {"const": 1}}, [1], [2]),
        ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [1], [1, 1]),
        ({"not": {"type": "string"}}, 1, "a"),
        ({"type": ["integer", "string"], "not": {"type": "string"}}, 1, "a"),
        ({"type": ["array", "null"], "uniqueItems": True}, None, [1, 1]),
        ({"dependentRequired": {"a": ["a", "b"]}, "required": ["a"]}, {"a": 1, "b": 1}, {"a": 1}),
        ({"if": False, "else": {"type": "string"}}, "a", 1),
        ({"minLength": 1}, "a", ""),
        ({"if": {"type": "string"}, "then": False}, 1, "a"),
        ({"dependentRequired": {"a": ["b"]}}, {}, {"a": 1}),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, {}, {"a": 1}),
        ({"propertyNames": {"maxLength": 2}}, {"ab": 1}, {"abc": 1}),
        ({"allOf": [{"properties": {"a": {"not": True}}}, {}]}, {}, {"a": 1}),
    ],
    ids=lambda it: json.dumps(it)[:50],
)
def test_what_asks_for_something_is_kept(schema: dict[str, Any], value: Any, other: Any) -> None:
    for one in (schema, plain(schema)):
        jsonschema.validate(value, one)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(other, one)


def test_no_keyword_that_constrains_is_taken_for_a_note() -> None:
    validators = (jsonschema.Draft202012Validator, jsonschema.Draft7Validator)
    for name in {name for it in validators for name in it.VALIDATORS} - {"$ref", "dependencies"}:
        beside = {"contains": {"const": 1}, "if": {"const": 1}, "then": False, "else": False}
        assert name in plain({**beside, name: {"items": False}}), name


@pytest.mark.parametrize("schema", [{}, {"title": "Any"}, {"$id": "x.json"}, {"$anchor": 5}])
def test_a_schema_that_asks_for_nothing_takes_everything(schema: Any, compiled: Grammars) -> None:
    assert plain(schema) == {}
    compiled.start(JsonOutput(schema, True), frozenset({END}))


def test_what_a_reference_points_into_stays() -> None:
    schema = {"not": {"not": {"not": False}}, "properties": {"a": {"$ref": "#/not/not"}}}
    assert_valid({"a": 1}, plain(schema))


KIND_A = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
KIND_B = {
    "type": "object",
    "properties": {"k": {"$ref": "#/$defs/letters~1b"}, "of": {"$ref": "#/$defs/union"}},
    "required": ["k"],
}
DEFS: dict[str, Any] = {
    "list": LIST,
    "chain": {"$ref": "#/$defs/chain2", "title": "Chain"},
    "chain2": {"allOf": [{"$ref": "#/$defs/list"}]},
    "either": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]},
    "kind a": KIND_A,
    "kind_b": KIND_B,
    "letters/b": {"enum": ["b", "c"]},
    "one": {"const": 1},
    "two": {"enum": [2, 3.0]},
    "union": {"oneOf": [{"$ref": "#/$defs/kind%20a"}, {"$ref": "#/$defs/kind_b"}]},
    "tagged": {"type": "object", "properties": {"Tag": TEXT}, "required": ["Tag"]},
    "closed": {"type": "object", "properties": {"Other": TEXT}, "additionalProperties": False},
}


@pytest.mark.parametrize(
    "branches",
    [
        ["integer", "list"],
        ["integer", "chain"],
        ["string", "either"],
        ["null", "kind_b"],
        ["one", "two"],
        ["one", "letters~1b", "list"],
        ["kind%20a", "kind_b"],
        ["tagged", "closed"],
        ["union", "integer"],
    ],
    ids="-".join,
)
def test_one_of_schemas_that_exclude_each_other(branches: list[str], compiled: Grammars) -> None:
    schema = {
        "oneOf": [
            {"type": it} if it in ("integer", "null", "string") else {"$ref": f"#/$defs/{it}"}
            for it in branches
        ],
        "$defs": DEFS,
    }
    for seed in range(6):
        found = walk(compiled.start(JsonOutput(schema, True), frozenset({END})), seed)
        assert_valid(json.loads(compiled._tokenizer.decode(found)), schema)
    renamed = json.loads(json.dumps(schema).replace("$defs", "definitions"))
    compiled.start(JsonOutput(renamed, True), frozenset({END}))


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0, 2]}],
        [{"$ref": "#/$defs/self"}, {"$ref": "#/$defs/self"}],
        [{"$ref": "#/$defs/open"}, {"$ref": "#/$defs/tagged"}],
        [{"properties": {"a": TEXT}, "required": ["a"]}, {"type": "integer"}],
    ],
    ids=json.dumps,
)
def test_one_of_schemas_that_may_both_match_is_refused(
    branches: list[Any], compiled: Grammars
) -> None:
    more = {"self": {"$ref": "#/$defs/self"}, "open": {"type": "object"}}
    schema = {"type": "array", "items": {"oneOf": branches}, "$defs": {**DEFS, **more}}
    assert refusal(compiled, response_format=json_schema(schema)) == (
        "response_format.json_schema.schema.items.oneOf: one value may match two of these schemas;"
        " use anyOf, or let them exclude each other"
    )


def random_schema(rng: random.Random, depth: int, names: str) -> dict[str, Any]:
    """A small schema of finite values, with idle keywords and references to these definitions."""
    if depth > 2 or rng.random() < 0.3:
        values = rng.sample([0, 1, 1.0, True, None, "a", "b", [], {}, "1"], rng.randint(1, 3))
        schema: dict[str, Any] = {"enum": values}
    elif names and rng.random() < 0.3:
        schema = {"$ref": f"#/$defs/{rng.choice(names)}"}
    elif (kind := rng.choice(["array", "object", "oneOf", "anyOf"])) == "array":
        schema = {"type": "array", "items": random_schema(rng, depth + 1, names), "maxItems": 2}
    elif kind == "object":
        keys = rng.sample("klm", 2)
        inside = {key: random_schema(rng, depth + 1, names) for key in keys}
        schema = {"type": "object", "properties": inside, "required": keys[: rng.randint(0, 2)]}
        schema |= rng.choice([{"additionalProperties": False}, {"maxProperties": 2}, {}])
    else:
        schema = {kind: [random_schema(rng, depth + 1, names) for _ in range(rng.randint(1, 3))]}
    keywords = [idle for base, idle in IDLE if base is not TEXT or "format" not in idle]
    return {**rng.choice([{}, {}, *keywords]), **schema} if depth < 3 else schema


def test_whatever_is_written_matches_the_schema_as_it_was_sent(
    compiled: Grammars, seed: int
) -> None:
    rng = random.Random(seed)
    written = 0
    for _ in range(60):
        defs = {name: random_schema(rng, 1, "abc"[:n]) for n, name in enumerate("abc")}
        schema = {**random_schema(rng, 0, "abc"), "$defs": defs}
        try:
            grammar = compiled.start(JsonOutput(schema, True), frozenset({END}))
        except InvalidRequestError:
            continue
        value = json.loads(compiled._tokenizer.decode(walk(grammar, seed)))
        jsonschema.Draft202012Validator(schema).validate(value)
        written += 1
    assert written > 10


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    friends: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]] = []
    secret: pydantic.SecretStr | None = None


class Home(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"examples": [{}]})
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    colour: Colour = Colour.RED
    rooms: dict[Colour, bool]
    pair: tuple[bool, Colour]


def test_schemas_of_pydantic(compiled: Grammars) -> None:
    wanted = JsonOutput(Home.model_json_schema(), True)
    for seed in range(4):
        start = compiled.start(wanted, frozenset({END}))
        for token_id in compiled._tokenizer.encode_text(['{"pet":{"kind":"cat","lives":9}'][0]):
            start.accept(token_id)
        found = compiled._tokenizer.decode(walk(start, seed))
        home = Home.model_validate_json('{"pet":{"kind":"cat","lives":9}' + found)
        assert home.pet == Cat(lives=9)


def test_schemas_of_zod(compiled: Grammars) -> None:
    """Written by `z.toJSONSchema` of zod 4."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT}
    names = {"type": "string", "enum": ["x", "y"]}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "record": record,
            "names": {**record, "propertyNames": names, "required": ["x", "y"]},
            "id": {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
            "none": {"not": {}},
            "of": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"type": {"type": "string", "const": name}},
                        "required": ["type"],
                        "additionalProperties": False,
                    }
                    for name in ("one", "two")
                ]
            },
            "int": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        },
        "required": ["names", "of"],
        "additionalProperties": False,
    }
    for seed in range(4):
        start = compiled.start(JsonOutput(schema, True), frozenset({END}))
        for token_id in compiled._tokenizer.encode_text('{"names":'):
            start.accept(token_id)
        found = compiled._tokenizer.decode(walk(start, seed))
        assert_valid(json.loads('{"names":' + found), schema)


A: dict[str, Any]
A, B = ({"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab")
CLOSED = {"additionalProperties": False}
HERE = "https://example.com/s/of.json"


@pytest.mark.parametrize(
    ("names", "references"),
    [
        ({"$anchor": "A"}, ["#A", "#/$defs/B%20%25"]),
        ({"$dynamicAnchor": "A"}, ["#A", "#B"]),
        ({"$dynamicAnchor": "A"}, ["dynamic #A", f"dynamic {HERE}#B"]),
        ({"$id": "#A"}, ["#A", "of.json#B"]),
        ({"$id": "A.json"}, ["A.json", "https://example.com/s/B.json"]),
        ({"$id": "/A/"}, ["../A/#", "/B/"]),
        ({"$id": "urn:x:A"}, ["urn:x:A", "urn:x:B#"]),
        ({"$id": "A.json", "$anchor": "k"}, ["A.json#k", "B.json#k"]),
    ],
    ids=str,
)
def test_references_by_name_are_followed(
    names: dict[str, str], references: list[str], compiled: Grammars
) -> None:
    other = {key: name.replace("A", "B") for key, name in names.items()}
    definitions = {"A": {**A, **names, **CLOSED}, "B %": {**B, **other, **CLOSED}}
    listed = [
        {"$dynamicRef": it.split()[1]} if it.startswith("dynamic") else {"$ref": it}
        for it in references
    ]
    schema = {"$id": HERE, "oneOf": listed, "$defs": definitions}
    ours = closed(plain(schema))
    found = set()
    for seed in range(8):
        text = compiled._tokenizer.decode(
            walk(compiled.start(JsonOutput(schema, True), frozenset({END})), seed)
        )
        assert_valid(json.loads(text), ours)
        found.add(json.loads(text)["k"])
    assert found == {"a", "b"}
    added = {"allOf": [listed[0], {"properties": {"b": TEXT}}], "$defs": {"A": {**A, **names}}}
    assert "additionalProperties" not in closed(plain({"$id": HERE, **added}))["$defs"]["A"]


@pytest.mark.parametrize("reference", ["$ref", "$dynamicRef", "$recursiveRef"])
def test_a_schema_may_refer_to_itself_by_name(reference: str, compiled: Grammars) -> None:
    of = {"type": "array", "maxItems": 1, "items": {reference: "#" if "rec" in reference else "#n"}}
    name = {"$recursiveAnchor": True} if "rec" in reference else {"$dynamicAnchor": "n"}
    schema = {**name, "type": "object", "properties": {"of": of}, "required": ["of"]}
    compiled.start(JsonOutput(schema, True), frozenset({END}))
    several = {**schema, "$defs": {"x": {"$id": "x.json", **name}}}
    if reference != "$ref":
        refused = refusal(compiled, response_format=json_schema(several))
        assert refused.endswith(
            'cannot be enforced; leave it out, or send "strict": false, which ignores it'
        )


def test_pointers_count_from_the_schema_that_has_an_address() -> None:
    inner = {"$id": "x.json", "$ref": "#/$defs/n", "$defs": {"n": {"const": 5}}}
    schema = {"properties": {"a": inner, "b": {"const": {"$id": "x.json", "$ref": "#"}}}}
    ours = plain({**schema, "$defs": {"n": {"const": 6}}})
    assert_valid({"a": 5, "b": {"$id": "x.json", "$ref": "#"}}, ours)


@pytest.mark.parametrize("never", [{"not": {}}, {"not": True, "title": "-"}, {"$ref": "#/$defs/n"}])
def test_what_may_never_appear(never: Any, compiled: Grammars) -> None:
    one = {"const": 1}
    schema = {
        "type": "object",
        "properties": {
            "never": never,
            "one": {"oneOf": [{"type": "string", "not": {}}, one]},
            "list": {"type": "array", "items": never},
        },
        "required": ["one", "list"],
        "additionalProperties": never,
        "$defs": {"n": {"not": {}}},
    }
    for seed in range(4):
        found = walk(compiled.start(JsonOutput(schema, True), frozenset({END})), seed)
        assert json.loads(compiled._tokenizer.decode(found)) == {"one": 1, "list": []}
    required = {**schema, "required": ["never"]}
    assert "no value matches it: required property 'never'" in refusal(
        compiled, response_format=json_schema(required)
    )
    assert "no value matches it" in refusal(compiled, response_format=json_schema({"not": {}}))


EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)


@pytest.mark.parametrize(
    ("pattern", "fine", "wrong"),
    [
        (EMAIL, ["a@b.co", "a.b+c@d-e.f.org"], [".a@b.co", "a..b@c.de", "a@b"]),
        (HOSTNAME, ["a.b", "localhost."], ["", ".", "a" * 64]),
        (r"^(?=.*[A-Z])(?!admin|root$)\w{4,9}$", ["Adam", "roots1A"], ["adam", "adminA", "root"]),
    ],
    ids=["email", "hostname", "name"],
)
def test_lookaheads_at_the_beginning_are_enforced(
    pattern: str, fine: list[str], wrong: list[str], compiled: Grammars
) -> None:
    """The first two are those of zod 4."""
    schema = {"type": "object", "properties": {"x": {"pattern": pattern}}, "required": ["x"]}
    start = compiled.start(JsonOutput(schema, True), frozenset({END}))

    def is_taken(text: str) -> bool:
        grammar = start.matcher.deep_copy()
        tokens = compiled._tokenizer.encode_text(json.dumps({"x": text}, separators=(",", ":")))
        return all(map(grammar.consume_token, tokens)) and grammar.is_accepting()

    assert [text for text in (*fine, *wrong) if is_taken(text)] == fine
    assert [text for text in (*fine, *wrong) if re.search(pattern, text)] == fine


def test_patterns_without_lookaheads_match_the_same_texts(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(letters) for n in range(6) for letters in product("ab.", repeat=n)]
    num_written = 0
    for _ in range(200):
        characters = ["a", "b", r"\.", "[ab]", "[^a]", r"\w"]
        ahead = ""
        for _ in range(rng.randint(1, 2)):
            words = ["".join(rng.choices(characters, k=rng.randint(1, 3))) for _ in range(2)]
            words = [
                rng.choice(["", "", ".*"]) + word + rng.choice(["", "", "$"]) for word in words
            ]
            ahead += f"(?{rng.choice('=!')}{'|'.join(words[: rng.randint(1, 2)])})"
        pattern = f"^{ahead}{rng.choice(['', '[ab]*$', '(a|b.)', 'a+|b'])}"
        written = without_lookaheads(pattern)
        if written is not None:
            num_written += 1
            expected = [text for text in texts if re.search(pattern, text)]
            found = [text for text in texts if all(re.search(it, text) for it in written)]
            assert found == expected, (pattern, written)
    assert num_written > 50


def _tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("inner", "place", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, ".uniqueItems", "uniqueItems cannot be enforced"),
        ({"not": {"type": "string"}}, ".not", "not cannot be enforced"),
        ({"type": "strnig"}, ".type", "Invalid type: strnig"),
        ({"$ref": "https://example.com/s.json"}, ".$ref", "this refers to another document"),
        ({"$ref": "#/$defs/missing"}, ".$ref", "Pointer '/$defs/missing' does not exist"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern", "a pattern that looks ahead"),
        ({"type": "string", "pattern": "^(?=a)b|c" + "d" * 400}, ".pattern", "a pattern that"),
        ({"type": "string", "pattern": "(" + "d" * 400}, ".pattern", "regex parse error: unclosed"),
        ({"type": "string", "format": "regex"}, ".format", "the format 'regex' cannot be enforced"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired", "dependent"),
    ],
    ids=lambda it: str(it)[:40],
)
def test_a_fault_is_named_by_its_path(
    inner: dict[str, Any], place: str, reason: str, compiled: Grammars
) -> None:
    fine = {f"p{n}": {"type": "array", "items": {"type": "null"}} for n in range(9)}
    schema = {
        "type": "object",
        "properties": {
            "first": {"$ref": "#/$defs/deep"},
            **fine,
            "a b": {"anyOf": [{"type": "null"}, {"type": "array", "items": inner, "minItems": 1}]},
        },
        "$defs": {"deep": fine["p0"]},
        "required": ["first", "a b"],
    }
    path = f".properties['a b'].anyOf[1].items{place}: {reason}"
    message = refusal(compiled, response_format=json_schema(schema))
    assert message.startswith(f"response_format.json_schema.schema{path}"), message
    tools = [_tool(OBJECT, "fine"), _tool(schema)]
    message = refusal(compiled, tools=tools, tool_choice="required")
    assert message.startswith(f"tools[1].function.parameters{path}"), message
    one = {"type": "function", "function": {"name": "f"}}
    assert message == refusal(compiled, tools=tools, tool_choice=one)
    defined = {**schema, "$defs": {"deep": {"type": "object", "properties": {"x": inner}}}}
    del defined["properties"]
    defined["properties"] = {"first": schema["properties"]["first"]}
    message = refusal(compiled, response_format=json_schema(defined))
    place = f".$defs.deep.properties.x{place}"
    assert message.startswith(f"response_format.json_schema.schema{place}: {reason}"), message


def test_a_schema_that_is_costly_to_simplify_takes_no_time_for_it() -> None:
    """Ten thousand of each part that is compared with others."""
    count = 10_000
    kinds = {"oneOf": [{"$ref": f"#/$defs/{n}"} for n in range(count)], "$defs": {}}
    kinds["$defs"] = {str(n): {"const": n} for n in range(count)}
    assert "oneOf" in plain(kinds)
    for pattern in (f"^(?!{'a' * 10**6})b", f"^{'(?!a|b)' * 10**5}", "^(?" + "[" * 10**6):
        assert plain({"pattern": pattern}) == {"pattern": pattern}
    idle = {"prefixItems": [{"not": False, "items": {"$ref": f"#/a/{n}"}} for n in range(count)]}
    assert all("not" not in it for it in plain(idle)["prefixItems"])
