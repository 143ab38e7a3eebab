"""Writes grammars in llama.cpp's form, GBNF.

The result accepts every text that the grammar accepts, except texts with the character NUL. Where
GBNF or this module has no exact form, the result accepts further texts. For example, the result has
no limits for numbers, and accepts any value where schemas are combined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from promptq.shared.protocol.schema_types import target_of
from promptq.worker.text.grammars.schema_patterns import ANNOTATIONS
from promptq.worker.text.grammars.terms import MAX_GRAMMAR_CHARS

_RULES = r"""esc ::= "\\" (["\\/bfnrt] | "u" [0-9A-Fa-f]{4})
char ::= [^"\\\x01-\x1F\x7F] | esc
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
"""
_MOST = 256
"""The most repetitions and alternatives of a pattern, an object or a list of values. llama.cpp may
have to follow all of them at each character."""
_DEEPEST = 32
_PLAIN = {"boolean": '"true" | "false"', "integer": "integer", "null": '"null"', "number": "number"}
_KINDS = ("object", "array", "string", *_PLAIN)
_COMBINING = frozenset({"$dynamicRef", "$ref", "allOf", "anyOf", "if", "not", "oneOf"})
_OPTIONS = {"lenient", "whitespace_pattern"}
_LARK = re.compile(
    r"""(?P<space>[ \t\r\n]+|(?://|\#)[^\n]*|%llguidance\s*\{\})|\??\b(?P<head>\w+)[ ]*:"""
    r"""|%json\s*(?P<json>)(?=\{)|(?P<text>"(?:\\.|[^"\\\n])*")(?!i\b|[ ]*\.\.)"""
    r"""|/(?P<regex>(?:\\.|[^/\\\n])+)/(?!\w)|<\[(?P<ids>[\d,]+)\]>|(?P<name>\w+)(?!\w|::)"""
    r"""|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|(?P<and>&)"""
    r"""|(?P<no>~)""",
    re.VERBOSE,
)
_REGEX = re.compile(
    r"(?P<open>\((?:\?s?:)?(?!\?))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<times>[*+?]|\{\d+(?:,\d*)?\})\??"
    r"|(?P<set>\[\^?(?:\\.|[^]\\[])+\]|\\[dwsDWS]|\.)"
    r"|(?P<text>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^\n\w]|[fnrtv])|[^][^$\\(){}*+?|.])",
    re.DOTALL,
)
_WITH_OTHERS = re.compile(r"\[\^|.*\\[dwsDWSuUx]|\.|.*[^\x00-\x7F]", re.DOTALL)
"""Matches a set of characters that may contain characters outside of ASCII."""
_CONTROLS = {"\\f": "\f", "\\n": "\n", "\\r": "\r", "\\t": "\t", "\\v": "\v"}
_ESCAPED = frozenset([*map(chr, range(32)), '"', "\\", "\x7f"])
"""Characters that a text in JSON contains only in their escaped form."""


@lru_cache(maxsize=32)
def gbnf_of(lark: str) -> str | None:
    """Returns the GBNF of a Lark text that `lark_of` returned. The Lark text may have rules, texts,
    patterns, schemas and token ids. Returns None if it has other parts, or if the result is too
    long."""
    try:
        text = _Writer().grammar(lark)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return text if len(text) <= MAX_GRAMMAR_CHARS else None


class _Writer:
    def __init__(self) -> None:
        self._rules: list[str] = []
        self._root: Mapping[str, Any] = {}
        self._named: dict[str, str] = {}  # rules of the root's parts, by reference
        self._space = ""
        self._left = _MOST
        self._num_chars = 0

    def grammar(self, lark: str) -> str:
        """Returns the whole grammar. Of an intersection `a & b`, only the first part is used."""
        lines, at, depth, skipped_from = ["root ::= n-start"], 0, 0, -1
        while at < len(lark):
            if (match := _LARK.match(lark, at)) is None:
                raise ValueError("unknown form")
            at, kind, token = match.end(), match.lastgroup, match[match.lastgroup or 0]
            depth += (kind == "open") - (kind == "close")
            if kind == "head" or depth < skipped_from or (kind == "bar" and depth == skipped_from):
                skipped_from = -1
            is_skipped = skipped_from >= 0
            match kind:
                case "head":
                    lines.append(f"{_name(token)} ::=")
                case "json":
                    schema, at = json.JSONDecoder().raw_decode(lark, at)
                    if not is_skipped:
                        lines[-1] += f" {self._json(schema)}"
                        # Where another value may follow, llguidance allows space after a value.
                        is_last = depth == 0 and len(lines) == 2 and not lark[at:].strip()
                        lines[-1] += "" if is_last else f" {self._space}"
                case "and":
                    skipped_from = depth if skipped_from < 0 else skipped_from
                case "no" if not is_skipped:
                    raise ValueError("unknown form")
                case _ if is_skipped or kind == "space":
                    pass
                case "text":
                    lines[-1] += f" {self._rule(_literal(json.loads(token)))}"
                case "regex":
                    lines[-1] += f" {self._rule(self._regex(token, is_json=False))}"
                case "ids":
                    lines[-1] += f" ({' | '.join(f'<[{each}]>' for each in token.split(','))})"
                case "name":
                    lines[-1] += f" {_name(token)}"
                case "times":
                    lines[-1] += self._times(token)
                case "bar":
                    self._spend(1)
                    lines[-1] += ' | ""'
                case _ if depth <= _DEEPEST:
                    lines[-1] += f" {token}"
                case _:
                    raise ValueError("unknown form")
        return "\n".join([*lines, *self._rules, _RULES])

    def _rule(self, body: str) -> str:
        self._num_chars += len(body)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise ValueError("too long")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name} ::= {body}")
        return name

    def _spend(self, number: int) -> None:
        """Count repetitions and alternatives. Raises ValueError if the grammar has too many."""
        self._left -= number
        if self._left < 0:
            raise ValueError("unknown form")

    def _times(self, token: str, *, is_group: bool = False) -> str:
        """Returns a repetition such as `{2,3}` in GBNF. For a group, numbers become `*`."""
        times = token
        if token.startswith("{"):
            least, comma, most = token[1:-1].partition(",")
            times = _limited(int(least), int(most) if most else None if comma else int(least))
            times = "*" if is_group else times
        self._spend(int(re.sub(r".*\D(?=\d+\D*$)|\D", "", times) or 1))
        return times

    # Patterns

    def _regex(self, pattern: str, *, is_json: bool) -> str:
        """Returns GBNF of a pattern that must match the whole text. With `is_json`, the text is the
        content of a JSON string."""
        parts, at = [""], 0
        while at < len(pattern):
            if (match := _REGEX.match(pattern, at)) is None:
                raise ValueError("unknown form")
            at, kind, token = match.end(), match.lastgroup, match[match.lastgroup or 0]
            is_group = pattern[match.start() - 1 : match.start()] == ")"
            if kind == "open":
                parts.append("")
            elif kind == "close":
                if len(parts) < 2:
                    raise ValueError("unknown form")
                group = self._rule(parts.pop() or '""')
                parts[-1] += f" {group}"
            elif kind == "bar":
                self._spend(1)
                parts[-1] += ' | ""'
            elif kind == "times":
                parts[-1] += self._times(token, is_group=is_group)
            elif kind == "set":
                parts[-1] += f" {_set(token, is_json)}"
            else:
                text = _CONTROLS.get(token, token)
                if text.startswith(("\\x", "\\u")):
                    text = chr(int(text[2:], 16))
                text = text[-1]
                parts[-1] += " esc" if is_json and text in _ESCAPED else f" {_literal(text)}"
        if len(parts) > 1:
            raise ValueError("unknown form")
        return parts[0] or '""'

    def _string(self, schema: Mapping[str, Any]) -> str:
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            is_begun = pattern.startswith("^")
            is_ended = pattern.endswith("$") and not pattern.endswith("\\$")
            inner = pattern[is_begun : len(pattern) - is_ended]
            self._left = _MOST
            try:
                body = self._regex(inner, is_json=True)
            except (ValueError, re.error):
                return r'"\"" char* "\""'
            if "|" in body:  # an anchor belongs to one alternative only
                is_begun = is_ended = False
            before, after = "" if is_begun else "char*", "" if is_ended else "char*"
            return rf'"\"" {before} {self._rule(body)} {after} "\""'
        return rf'"\"" char{_between(schema, "minLength", "maxLength")} "\""'

    # Values of JSON

    def _json(self, schema: dict[str, Any]) -> str:
        options = schema.get("x-guidance", {})
        if options.keys() - _OPTIONS or options.get("whitespace_pattern", "[ ]") != "[ ]":
            raise ValueError("unknown form")
        self._space = '" "?' if "whitespace_pattern" in options else r"[ \t\n\r]*"
        self._root, self._named = schema, {}
        return self._value(schema)

    def _value(self, schema: Any) -> str:
        """Returns the name of a rule for a JSON value that matches `schema`."""
        keys = schema.keys() - ANNOTATIONS if isinstance(schema, dict) else set()
        if not keys or (keys & _COMBINING and (len(keys) > 1 or keys & {"allOf", "if", "not"})):
            schema, keys = {}, {"$ref"}
        reference = str(schema.get("$ref", "")) if keys == {"$ref"} else None
        if reference is not None and reference in self._named:
            return self._named[reference]
        rule, at = self._rule(""), len(self._rules) - 1
        if reference is not None:
            self._named[reference] = rule
        self._rules[at] += self._body(schema)
        return rule

    def _body(self, schema: Mapping[str, Any]) -> str:
        if "$ref" in schema:
            return self._value(target_of(schema["$ref"], self._root))
        for name in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(name), list) and 0 < len(branches) <= _MOST:
                return " | ".join(map(self._value, branches))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and 0 < len(values) <= _MOST:
            return " | ".join(map(self._constant, values))
        kinds = schema.get("type", _KINDS)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        parts = {"object": self._object, "array": self._array, "string": self._string}
        return " | ".join(parts[kind](schema) if kind in parts else _PLAIN[kind] for kind in kinds)

    def _constant(self, value: Any) -> str:
        if isinstance(value, dict):
            properties = {name: {"const": each} for name, each in value.items()}
            closed = {"additionalProperties": False, "required": [*value]}
            return self._object({"properties": properties, **closed})
        if isinstance(value, list):
            items = [{"const": each} for each in value]
            return self._array({"prefixItems": items, "items": False, "minItems": len(items)})
        if isinstance(value, str):
            return _quoted(value)
        return "number" if isinstance(value, float) else _literal(json.dumps(value))

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = True if schema.get("patternProperties") else schema.get("additionalProperties")
        colon, comma = f'{self._space} ":" {self._space}', f'{self._space} "," {self._space}'
        more, first = "", ""
        if len(properties) > _MOST:
            properties, others = {}, True
        if others is not False:
            key = self._string({})
            pair = self._rule(f"{key} {colon} {self._value(others)}")
            more, first = f"({comma} {pair})*", f"({pair} ({comma} {pair})*)?"
        for name in reversed(properties):
            pair = self._rule(f"{_quoted(name)} {colon} {self._value(properties[name])}")
            begun = f"{pair} {more}"
            if name in required:
                more, first = f"{comma} {begun}", begun
            else:
                more, first = f"({comma} {pair})? {more}", f'({begun} | "" {first})'
            more, first = self._rule(more or '""'), self._rule(first)
        return f'"{{" {self._space} {first} {self._space} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        others = schema.get("additionalItems", True) if isinstance(items, list) else items
        comma, more = f'{self._space} "," {self._space}', ""
        elements = [self._value(each) for each in first]
        if others is not False:
            another = self._value(others)
            more = self._rule(f"{comma} {another}")
            more += _between(schema, "minItems", "maxItems", max(1, len(elements)))
            elements = elements or [another]
        least = schema.get("minItems", 0)
        for number, element in reversed([*enumerate(elements)]):
            more = self._rule(f"{comma if number else ''} {element} {more}")
            more += "" if number < least else "?"
        return f'"[" {self._space} {more} {self._space} "]"'


def _name(name: str) -> str:
    return f"n-{name.replace('_', '-')}"


def _literal(text: str) -> str:
    characters = (
        each if " " <= each <= "~" and each not in '"\\' else f"\\U{ord(each):08X}" for each in text
    )
    return f'"{"".join(characters)}"'


def _quoted(text: str) -> str:
    parts = [
        "esc" if each in _ESCAPED else _literal(each)
        for each in re.split(r'([\x00-\x1f"\\\x7f])', text)
        if each
    ]
    return " ".join(['"\\""', *parts, '"\\""'])


def _set(token: str, is_json: bool) -> str:
    """Returns GBNF of a one-character pattern. All characters outside ASCII match, or none does."""
    if re.search(r"&&|--|~~|\|\|", token):
        raise ValueError("unknown form")
    matches = re.compile(token, re.ASCII | re.DOTALL).match  # in Rust, \x1C is no space
    found = {each for each in map(chr, range(1, 128)) if matches(each)}
    plain = found - _ESCAPED if is_json else found
    ranges = "".join(f"\\x{ord(each):02X}" for each in sorted(plain))
    if _WITH_OTHERS.match(token):
        ranges += "\\U00000080-\\U0010FFFF"
    if not ranges and found == plain:
        raise ValueError("a set without characters")
    parts = [f"[{ranges}]"] if ranges else []
    return f"({' | '.join([*parts, 'esc'] if found != plain else parts)})"


def _between(schema: Mapping[str, Any], least: str, most: str, less: int = 0) -> str:
    limit = schema.get(most)
    number = int(schema.get(least, 0)) - less
    return _limited(max(0, number), None if limit is None else max(0, int(limit) - less))


def _limited(least: int, most: int | None) -> str:
    if most is None or most > _MOST:
        return f"{{{min(least, _MOST)},}}"
    return f"{{{least},{most}}}"
