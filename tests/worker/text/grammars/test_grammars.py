"""Compiling what requests want, for all kinds of vocabularies."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import (
    NO_ARGUMENTS,
    ChoiceOutput,
    GrammarOutput,
    JsonOutput,
    RegexOutput,
    ToolCallOutput,
    ToolSchema,
)
from promptq.worker.engine.api.grammar import Grammar, GrammarError
from promptq.worker.shipped import MODEL_DIR
from promptq.worker.text.grammars.refusals import refusal_message
from promptq.worker.text.grammars.schema_masks import Grammars
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.text.families import FAMILIES, byte_fallback
from tests.worker.text.grammars.structured import SCHEMAS, assert_valid, closed, compilations

END = 2
VOCAB_SIZE = 2048
QWEN = '{%- if tools %}<tool_call>\n{"name": <function-name>{%- endif %}'
LLAMA = '{"name": function name, "parameters": dictionary of argument name and its value}'


def grammars(tokenizer: Any = None, vocab_size: int = VOCAB_SIZE) -> Grammars:
    if tokenizer is None:
        ours = HuggingFaceTokenizer.load(str(MODEL_DIR))
    else:
        ours = HuggingFaceTokenizer(tokenizer)
    return Grammars(ours, vocab_size, frozenset({END}))


def allowed(grammar: Grammar, vocab_size: int = VOCAB_SIZE) -> list[int]:
    masks = np.zeros((1, grammar.masker.num_words), dtype=np.int32)
    assert grammar.masker.fill([grammar], masks) == {}
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def walk(grammar: Grammar, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Tokens chosen evenly among those allowed, until the end."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while not grammar.is_complete:
        token_id = rng.choice(allowed(grammar, vocab_size))
        if token_id == END:
            break
        grammar.accept(token_id)
        tokens.append(token_id)
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_token_is_allowed_as_in_the_mask(name: str) -> None:
    """Where only one text may follow, a mask allows only one of its spellings."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    grammar = grammars().start(JsonOutput(SCHEMAS[name], True), frozenset({END}))
    for _ in range(12):
        mask = allowed(grammar)
        assert [each for each in range(VOCAB_SIZE) if grammar.allows(each)] == mask
        if not (choice := [each for each in mask if each != END]):
            break
        grammar.accept(rng.choice(choice))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_whatever_is_allowed_leads_to_what_matches(kind: str, name: str, seed: int) -> None:
    tokenizer = byte_fallback() if kind == "byte fallback" else None
    size = len(tokenizer) if tokenizer is not None else VOCAB_SIZE
    compiled = grammars(tokenizer, size)
    tokens = walk(compiled.start(JsonOutput(SCHEMAS[name], True), frozenset({END})), seed, size)
    decode = HuggingFaceTokenizer(tokenizer) if tokenizer else compiled._tokenizer
    assert_valid(json.loads(decode.decode(tokens)), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "regex", [r"(ab|c/){2,4}", r'\w{1,5}@[a-z]\.(de|"ü")\n?', "^yes$", "a\nb|[^a]"]
)
def test_what_a_regex_allows_leads_to_what_it_matches(regex: str, seed: int) -> None:
    compiled = grammars()
    tokens = walk(compiled.start(RegexOutput(regex), frozenset({END})), seed)
    assert re.fullmatch(regex, compiled._tokenizer.decode(tokens))


def test_a_choice_allows_each_of_its_texts_and_no_other() -> None:
    texts = ("yes", 'yes, "sir"', "nö\n", "a|b /c/")
    compiled = grammars()
    found = {
        compiled._tokenizer.decode(
            walk(compiled.start(ChoiceOutput(texts), frozenset({END})), seed)
        )
        for seed in range(60)
    }
    assert found == {*texts}


def test_a_choice_may_have_tokens_of_their_own_but_no_special_ones() -> None:
    tokenizer = FAMILIES["Hermes"].tokenizer()
    size = tokenizer.num_tokens
    compiled = Grammars(tokenizer, size, frozenset({END}))
    wanted = ChoiceOutput(("a<think>b", "a", "ac"))
    walks = [walk(compiled.start(wanted, frozenset({END})), seed, size) for seed in range(60)]
    assert {tokenizer.decode(it) for it in walks} == {*wanted.texts}
    assert any(tokenizer.added_tokens["<think>"] in it for it in walks)
    special = next(iter(tokenizer.special_tokens))
    with pytest.raises(InvalidRequestError, match=r"the choice is refused: .* a special token"):
        compiled.start(ChoiceOutput(("a", f"b{special}")), frozenset({END}))


SUMS = """
?start: sum
sum: product ("+" product)*
product: NUMBER | "(" sum ")" | shape
shape: %json {"enum": ["fox", {"n": 1}]}
NUMBER: /[0-9]{1,2}/
%import common.WS
"""


@pytest.mark.parametrize("seed", range(5))
def test_what_a_grammar_allows_is_what_it_derives(seed: int) -> None:
    compiled = grammars()
    grammar = compiled.start(GrammarOutput(SUMS), frozenset({END}))
    for token_id in compiled._tokenizer.encode_text('12+(7+"fox"'):
        grammar.accept(token_id)
    assert END not in allowed(grammar)
    for token_id in compiled._tokenizer.encode_text(")"):
        grammar.accept(token_id)
    text = compiled._tokenizer.decode(walk(grammar, seed)[:40])
    assert not text or text[0] == "+"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "a" b\nb: c\n', 'line 2: unknown name: "c"'),
        ('start: "a\n', "line 1: lexer error"),
        ("start: A\nA: /(/", "line 2: invalid regex"),
        ('\nstart: %json {"uniqueItems": true}', "line 2: uniqueItems cannot be enforced"),
        ("begin: start", "no start rule found"),
        ('start: "a" & ', "line 1: "),
    ],
)
def test_a_refused_grammar_is_an_error_with_the_line(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammars().start(GrammarOutput(grammar), frozenset({END}))
    assert str(caught.value).startswith(f"response_format: the grammar is refused: {reason}")
    assert "|" not in str(caught.value)
    assert (caught.value.field, caught.value.error_type) == ("response_format", "unsupported")


def test_a_grammar_without_an_end_is_refused_in_words() -> None:
    said = refusal_message(
        GrammarOutput("start: start"), "NoExtensionBias", str
    )  # the vetter's word
    assert said == "response_format: the grammar is refused: no text matches it"


@pytest.mark.parametrize(
    "grammar",
    [
        "start: A\nA: " + " & ".join(f"/.*{chr(97 + n)}.*/" for n in range(13)),
        "start: %json "
        + json.dumps({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(13)]}),
    ],
)
def test_a_grammar_may_combine_as_many_patterns_as_a_schema(grammar: str) -> None:
    with pytest.raises(InvalidRequestError, match="12 patterns at most, and this one"):
        grammars().start(GrammarOutput(grammar), frozenset({END}))
    texts = " | ".join(f'"&{n}" | /[&{n}]/' for n in range(20))
    grammars().start(
        GrammarOutput(f"start: {texts}  // & & & & & & & & & & & & &"), frozenset({END})
    )


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("(?=a)b", "look-around"),
        ("(", "regex parse error"),
        (r"(a)\1", "backreferences"),
        ("a\\", "ends with a backslash"),
    ],
)
def test_a_refused_regex_is_an_error_with_the_reason(regex: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammars().start(RegexOutput(regex), frozenset({END}))
    assert str(caught.value).startswith("response_format: the regex is refused: ")
    assert reason in str(caught.value)


def test_one_schema_is_compiled_once_and_its_states_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = compilations(monkeypatch)
    compiled = grammars()
    wanted = JsonOutput(closed(a={"enum": [1, 2]}), True)
    first, second = (compiled.start(wanted, frozenset({END})) for _ in range(2))
    assert len(texts) == 1
    beginning = allowed(second)
    first.accept(beginning[0])
    assert allowed(second) == beginning
    assert allowed(first) != beginning
    compiled.start(JsonOutput({"type": "null"}, True), frozenset({END}))
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced"),
        ({"not": {"type": "string"}}, "not cannot be enforced"),
        ({"type": "strnig"}, "Invalid type: strnig"),
        ({"$ref": "https://example.com/schema.json"}, "refers to another document"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "(?=a)b"}, "a pattern that looks ahead"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value matches it"),
        ({"enum": []}, "no value matches it"),
        ({"type": "number", "minimum": float("inf")}, ""),
        ({"properties": {"a": {}}, "required": 5}, "Expected array for 'required'"),
        (
            {"oneOf": [{"properties": 5}], "discriminator": {"propertyName": "a"}},
            "properties must be an object",
        ),
    ],
)
def test_a_refused_schema_is_an_error_with_the_reason(schema: dict[str, Any], reason: str) -> None:
    compiled = grammars()
    for wanted, field in (
        (JsonOutput(schema, True), "response_format"),
        (ToolCallOutput((ToolSchema("f", schema, True),)), "tools"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            compiled.start(wanted, frozenset({END}))
        assert str(caught.value).startswith(field)
        assert "%json" not in str(caught.value)
        assert reason in str(caught.value)
        assert (caught.value.field, caught.value.error_type) == (field, "unsupported")
    compiled.start(JsonOutput({"type": "null"}, True), frozenset({END}))


def test_not_strict_ignores_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = compilations(monkeypatch)
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 3, "uniqueItems": True}
    compiled = grammars()
    compiled.start(JsonOutput(schema, strict=False), frozenset({END}))
    compiled.start(ToolCallOutput((ToolSchema("f", schema, False),)), frozenset({END}))
    assert len(texts) == 2


def random_json(rng: random.Random, depth: int = 0) -> Any:
    keys = ["type", "properties", "items", "enum", "pattern", "$ref", "anyOf", "minimum", "const"]
    keys += ["maxLength", "$defs", "required", "format", "oneOf", "allOf", "x-guidance", "minItems"]
    if depth < 4 and rng.random() < 0.6:
        if rng.random() < 0.7:
            return {rng.choice(keys): random_json(rng, depth + 1) for _ in range(rng.randint(0, 4))}
        return [random_json(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    words = ["object", "string", "#", "#/$defs", "[", "\x00"]
    return rng.choice([None, True, -1, 10**30, 1.5, *words])


@pytest.fixture(scope="module")
def shared() -> Grammars:
    return grammars()


@pytest.mark.parametrize("seed", range(300))
def test_whatever_the_schema_it_is_compiled_or_refused(seed: int, shared: Grammars) -> None:
    schema = random_json(random.Random(seed))
    if not isinstance(schema, dict):
        schema = {"properties": schema}
    with suppress(InvalidRequestError):
        assert allowed(shared.start(JsonOutput(schema, True), frozenset({END})))


def test_calls_are_written_as_the_models_template_teaches() -> None:
    tools = (ToolSchema("say", closed(n={"enum": [1]}), True),)
    expected = {
        QWEN: '<tool_call>\n{"name": "say", "arguments": {"n":1}}\n</tool_call>',
        LLAMA: '{"name": "say", "parameters": {"n":1}}',
        "": '{"name": "say", "arguments": {"n":1}}',
        "<tool_call>\n<function=say>": '{"name": "say", "arguments": {"n":1}}',
    }
    for template, call in expected.items():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
        tokenizer.chat_template = template
        grammar = grammars(tokenizer).start(ToolCallOutput(tools), frozenset({END}))
        for token_id in tokenizer.encode(call):
            assert not grammar.is_complete
            grammar.accept(token_id)
        assert grammar.is_complete


def test_a_token_that_does_not_fit_is_an_error() -> None:
    grammar = grammars().start(JsonOutput({"type": "null"}, True), frozenset({END}))
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        grammar.accept(END)


def test_a_vocabulary_smaller_than_the_tokenizer_is_enough() -> None:
    grammar = grammars(vocab_size=300).start(JsonOutput({"const": 1}, True), frozenset({END}))
    assert grammar.masker.num_words == VOCAB_SIZE // 32


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        chat_template = None

        def decode(self) -> None: ...

    with pytest.raises(InvalidRequestError, match=r"^response_format: the model's tokenizer"):
        grammars(Slow()).start(JsonOutput({}, True), frozenset({END}))


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys; from promptq.worker.serve import build, worker\n"
        "sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_is_written_as_the_family_writes_it(name: str) -> None:
    """With the special tokens that the model was trained with, not with their letters."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    size = tokenizer.num_tokens
    compiled = Grammars(tokenizer, size, frozenset({END}))
    wanted = ToolCallOutput((ToolSchema("stop-all", NO_ARGUMENTS, True),))
    tokens = walk(compiled.start(wanted, frozenset({END})), 0, size)
    text = tokenizer.decoder(family.style.call_marks)(tokens)
    text = re.sub(r"(?<=stop-all:)[0-9]{1,3}(?=<)", "0", text)
    text = re.sub(r"(?<=\[CALL_ID\])[a-zA-Z0-9]{9}", "a1b2c3d4e", text)
    assert text.replace("{ }", "{}") == family.forced
    for mark in family.special:
        assert (tokenizer.special_tokens[mark] in tokens) == (mark in family.forced)


def test_objects_have_the_properties_that_are_named() -> None:
    """Clients leave out `additionalProperties`, and a weak model would go on with other keys."""
    point = {"type": "object", "properties": {"x": {"enum": [1]}}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2}},
        "$defs": {"p": point},
    }
    compiled = grammars()
    for seed in range(5):
        called = ToolCallOutput((ToolSchema("f", schema, True),))
        tokens = walk(compiled.start(called, frozenset({END})), seed)
        arguments = json.loads(compiled._tokenizer.decode(tokens))["arguments"]
        tokens = walk(compiled.start(JsonOutput(schema, True), frozenset({END})), seed)
        for made in (arguments, json.loads(compiled._tokenizer.decode(tokens))):
            assert made.keys() <= {"a"}
            assert all(it in ({}, {"x": 1}) for it in made.get("a", []))
    schema["additionalProperties"] = True
    free = compiled.start(JsonOutput(schema, True), frozenset({END}))
    for token_id in compiled._tokenizer.encode_text('{"b'):
        free.accept(token_id)
