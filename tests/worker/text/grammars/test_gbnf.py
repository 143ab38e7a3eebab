"""GBNF accepts each text that a worker's own grammar accepts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import (
    ChoiceOutput,
    GrammarOutput,
    JsonOutput,
    Output,
    RegexOutput,
)
from promptq.worker.engine.api.grammar import Grammar
from promptq.worker.text.grammars.gbnf import gbnf_of
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from tests.worker.text.formats import FORMATS, SCHEMA, Format
from tests.worker.text.grammars.structured import SCHEMAS, closed
from tests.worker.text.grammars.test_call_grammar import forced, grammar_of, tool
from tests.worker.text.grammars.test_grammars import END, allowed, grammars
from tests.worker.text.grammars.test_schemas import random_schema

_PARTS = re.compile(
    r'\s*(?:"((?:\\.|[^"\\])*)"|\[(\^?)((?:\\.|[^\]\\])*)\]|<\[(\d+)\]>|([A-Za-z0-9-]+)'
    r"|([*+?]|\{\d+(?:,\d*)?\})|([()|]))"
)
_CHARACTER = re.compile(r"\\U(.{8})|\\u(.{4})|\\x(..)|\\(.)|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_MOST_REPEATED = 2000

Element = tuple[str, Any]
"""A token id, a rule's name, or (whether it excludes, ranges of characters)."""
Stack = Any  # None, or the first element and the stack behind it


def _characters(text: str) -> list[str]:
    return [
        chr(int(match[1] or match[2] or match[3], 16))
        if match[1] or match[2] or match[3]
        else _CONTROLS.get(match[4], match[4]) or match[5]
        for match in _CHARACTER.finditer(text)
    ]


class Acceptor:
    """The rules of a GBNF text. Raises AssertionError for a text that llama.cpp would refuse."""

    def __init__(self, gbnf: str) -> None:
        self._rules: dict[str, list[list[Element]]] = {}
        for line in filter(None, gbnf.splitlines()):
            name, _, body = line.partition(" ::=")
            assert body.strip(" |"), f"{line}: the next rule would be read as its body"
            assert not body.rstrip().endswith("|"), line
            assert name not in self._rules, line
            self._rules[name], rest = self._alternatives(body)
            assert not rest, line
        used = {
            each[1]
            for rule in self._rules.values()
            for seq in rule
            for each in seq
            if each[0] == "rule"
        }
        assert used <= self._rules.keys(), used - self._rules.keys()

    def _new(self, body: list[list[Element]]) -> Element:
        name = f"_{len(self._rules)}"
        self._rules[name] = body
        return "rule", name

    def _alternatives(self, text: str) -> tuple[list[list[Element]], str]:
        """Returns the alternatives up to a closing parenthesis, and the text behind it."""
        found: list[list[Element]] = [[]]
        last: list[Element] = []
        while text.strip():
            match = _PARTS.match(text)
            assert match is not None, text
            text = text[match.end() :]
            literal, negated, members, token_id, name, times, mark = match.groups()
            if mark == "(":
                inner, text = self._alternatives(text)
                last = [self._new(inner)]
            elif mark == ")":
                return found, text
            elif mark == "|":
                found.append([])
                continue
            elif times:
                least, _, most = {"*": "0,", "+": "1,", "?": "0,1"}.get(
                    times, times[1:-1]
                ).partition(",")
                found[-1] = found[-1][: len(found[-1]) - len(last)]
                most = most if "," in times or times in "*+?" else least
                found[-1] += self._repeated(last, int(least), int(most) if most else None)
                last = []
                continue
            elif literal is not None:
                last = [("set", (False, ((each, each),))) for each in _characters(literal)]
            elif members is not None:
                last = [("set", (bool(negated), (*self._ranges(members),)))]
            else:
                last = [("token", int(token_id)) if token_id else ("rule", name)]
            found[-1] = found[-1] + last
        return found, ""

    def _repeated(self, what: list[Element], least: int, most: int | None) -> list[Element]:
        assert what, "nothing is repeated"
        assert max(least, most or 0) <= _MOST_REPEATED
        if most is None:
            loop = self._new([])
            self._rules[loop[1]] = [[*what, loop], []]
            return [*what * least, loop]
        rest: list[Element] = []
        for _ in range(most - least):
            rest = [self._new([[*what, *rest], []])]
        return [*what * least, *rest]

    def _ranges(self, members: str) -> list[tuple[str, str]]:
        parts = [match[0] for match in _CHARACTER.finditer(members)]
        ranges = []
        while parts:
            first = last = parts.pop(0)
            if len(parts) > 1 and parts[0] == "-":
                last = parts[1]
                del parts[:2]
            ranges.append((_characters(first)[0], _characters(last)[0]))
        return ranges

    def _advanced(self, stack: Stack) -> set[Stack]:
        """Returns stacks that begin with a character or a token."""
        found, left, seen = set[Stack](), [stack], set[Stack]()
        while left:
            stack = left.pop()
            if stack in seen:
                continue
            seen.add(stack)
            assert len(seen) < 10_000, "left recursion"
            if stack is None or stack[0][0] != "rule":
                found.add(stack)
                continue
            (_, name), rest = stack
            for sequence in self._rules[name]:
                longer = rest
                for element in reversed(sequence):
                    longer = (element, longer)
                left.append(longer)
        return found

    def read(self, text: Iterable[str | int]) -> tuple[int, bool]:
        """Returns how many characters and token ids may follow each other, and whether the text may
        end there."""
        stacks, number = self._advanced((("rule", "root"), None)), 0
        for each in text:
            after = set[Stack]()
            for stack in stacks:
                if stack is not None and self._matches(stack[0], each):
                    after |= self._advanced(stack[1])
            if not after:
                break
            stacks, number = after, number + 1
        return number, None in stacks

    def _matches(self, element: Element, each: str | int) -> bool:
        kind, value = element
        if isinstance(each, int):
            return kind == "token" and value == each
        if kind != "set":
            return False
        negated, ranges = value
        return any(first <= each <= last for first, last in ranges) is not negated


MORE_SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    closed(when={"type": "string", "format": "date-time"}, who={"format": "email"}),
    closed(text={"type": "string", "minLength": 3, "maxLength": 900}),
    {
        "type": "array",
        "prefixItems": [{"const": [1, {"a": 'é\n"\\/\x7f', "b": -0.5}]}],
        "items": False,
    },
    {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"enum": [True]}],
        "minItems": 1,
        "maxItems": 4,
    },
    {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"b": {}, "a": {"const": 1}}, "required": ["c", "a"]},
    {"allOf": [closed(a={"type": "integer"}), {"properties": {"a": {"minimum": 3}}}]},
    {"type": ["string", "null"], "pattern": r"^\S+ \d{2,}[\s\S]?[^a-z\]]*$"},
    {"type": "string", "pattern": r"a|\x22(b[\"/-]|\.)+?"},
    {"type": "string", "pattern": "^(é|ß[α-ω]){1,3}$"},
    {"type": "string", "pattern": r"\p{Greek}"},
    {
        "$ref": "#/$defs/list",
        "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}},
    },
    {"anyOf": [{"type": "integer", "multipleOf": 5}, closed(self={"$ref": "#"})]},
]
REGEXES = [
    r'[0-9]{3,9}( [a-c"/]+)?',
    r"(?s:.{2})\n\t[^\n]*",
    r"(ab|c|)\.\w\W\s+?",
    r"[\x41-\x45é]*",
    r"[\U0001F600-\U0001F64F]b[a\U0001F600]\S*",
    "a{200}b{2}",
    "a{300}",
]
CHOICES = ("a", 'b"\\', "<think>", "é🦊\n", "<think>x")
LARK = r"""%llguidance {}
?start: "a" (T | some_value)+ // one
  | <[1]> more{2,3}
T: /[b-d]/ & ~/c/ | "é\n\""
some_value: %json {"type": "array", "maxItems": 1}
more: "x"? <[1,3]>
"""


def outputs(rng: random.Random) -> Iterator[Output]:
    for schema in [*SCHEMAS.values(), *MORE_SCHEMAS]:
        yield JsonOutput(schema, True)
    for _ in range(40):
        defs = {name: random_schema(rng, 1, "abc"[:n]) for n, name in enumerate("abc")}
        yield JsonOutput({**random_schema(rng, 0, "abc"), "$defs": defs}, rng.random() < 0.5)
    for regex in REGEXES:
        yield RegexOutput(regex)
    yield ChoiceOutput(CHOICES)
    yield GrammarOutput(LARK)


def written(tokens: list[int], tokenizer: HuggingFaceTokenizer) -> list[str | int]:
    """The characters of the tokens, and the ids of added tokens."""
    added = {*tokenizer.added_tokens.values()}
    found: list[str | int] = []
    plain: list[int] = []
    for token_id in [*tokens, -1]:
        if token_id == -1 or token_id in added:
            found += tokenizer.decode(plain)
            plain = []
            found += [] if token_id == -1 else [token_id]
        else:
            plain.append(token_id)
    return found


def assert_accepted(grammar: Grammar, tokenizer: HuggingFaceTokenizer, rng: random.Random) -> None:
    """Follows a random output, which the GBNF of the same grammar must accept up to each end."""
    assert grammar.source is not None
    gbnf = gbnf_of(grammar.source)
    assert gbnf is not None, grammar.source
    acceptor, tokens = Acceptor(gbnf), list[int]()
    is_short = rng.random() < 0.5
    while not grammar.is_complete and len(tokens) < 60:
        choice = allowed(grammar, tokenizer.num_tokens)
        if END in choice and (is_short or choice == [END] or rng.random() < 0.2):
            break
        if is_short:  # such as marks of JSON instead of letters
            choice = sorted(choice, key=lambda each: len(tokenizer.decode([each])))[:40]
        token_id = rng.choice([each for each in choice if each != END])
        if "\0" not in tokenizer.decode([token_id]):  # GBNF cannot have it
            tokens.append(token_id)
            grammar.accept(token_id)
    is_over = grammar.is_complete or END in allowed(grammar, tokenizer.num_tokens)
    text = written(tokens, tokenizer)
    while text and text[-1] == "\N{REPLACEMENT CHARACTER}":  # cut inside of a character
        text.pop()
    number, may_end = acceptor.read(text)
    assert number == len(text), (text[:number], text[number:], grammar.source, gbnf)
    assert may_end or not is_over, (text, grammar.source, gbnf)


def test_each_text_of_a_grammar_is_one_of_its_gbnf() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    compiled, num_checked = grammars(), 0
    for wanted in outputs(rng):
        for _ in range(3):
            try:
                grammar = compiled.start(wanted, frozenset({compiled._tokenizer.end_token_id or 0}))
            except InvalidRequestError:
                break
            assert_accepted(grammar, compiled._tokenizer, rng)
            num_checked += 1
    assert num_checked > 100


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_each_forced_call_is_a_text_of_its_gbnf(format: Format) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    request = forced(format, tool("get_weather", SCHEMA), tool("stop_all"))
    for _ in range(5):
        assert_accepted(grammar_of(format, request), format.tokenizer(), rng)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (
            closed(a={"type": "integer"}),
            ['{"a":1', '{"a":01}', '{"b":1}', '{"a":1,}', "{}", '{"a":"1"}'],
        ),
        ({"enum": ["ab", 7]}, ['"a', '"abc"', "ab", "78", "8"]),
        ({"type": "string", "pattern": "^[a-c]{2}$"}, ['"a"', '"ad"', '"abc"', '"a\\u0062"', "ab"]),
        ({"type": "string", "maxLength": 2}, ['"abc"', '"a\n"', '"\\x"']),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
            ["[]", "[null", "[null,null,null]", "[null,]"],
        ),
        (
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "type": "object"},
            ['{"b":1,"a":1}', '{"a":1"b":1}'],
        ),
        ({"anyOf": [{"type": "boolean"}, {"const": None}]}, ["nul", "tru", "falsey", "1"]),
    ],
)
def test_no_other_text_of_a_plain_schema_is_one_of_its_gbnf(schema: Any, texts: list[str]) -> None:
    grammar = grammars().start(JsonOutput(schema, True), frozenset({END}))
    acceptor = Acceptor(gbnf_of(grammar.source or f"start: %json {schema}") or "")
    for text in texts:
        number, may_end = acceptor.read(text)
        assert number < len(text) or not may_end, text


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a"i',
        'start: "a".."z"',
        "start: ~/a/",
        "start: /a/s",
        "start: /a|(?=b)/",
        "start: <[^1]>",
        "start: <think>",
        "start[lazy]: /a/",
        "start: /[a-z&&[^b]]/",
        'start: %json {"x-guidance": {"item_separator": "-"}}',
        "start: WS\n%import common.WS",
        'start: %json {"type": "object"',
        'start: %json {"x-guidance": 5}',
        "start: /[\0]/",
        f"start: {'(' * 40} /a/ {')' * 40}",
        f"start: /{'a?' * 300}/",
        f"start: /{'|'.join('ab' * 200)}/",
        f'start: "{"a" * 2**18}"',
    ],
)
def test_a_grammar_of_another_form_has_no_gbnf(lark: str) -> None:
    assert gbnf_of(lark) is None
