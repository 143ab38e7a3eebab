"""Writes the grammar of a forced tool call, in the form that the model's family uses for calls.

If this form cannot express the schema of a tool's arguments, the call is a JSON object instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from promptq.shared.protocol.output_format import ToolSchema
from promptq.shared.protocol.output_style import (
    CHANNELS,
    LITERALS,
    NAMED,
    OBJECT,
    TAGGED,
    OutputStyle,
)
from promptq.shared.protocol.schema_types import target_of, types_of
from promptq.worker.text.grammars.llguidance_calls import options_of
from promptq.worker.text.grammars.references import all_references
from promptq.worker.text.grammars.schema_patterns import ANNOTATIONS
from promptq.worker.text.grammars.terms import MAX_GRAMMAR_CHARS, any_of, terms

_IDS = {":": "/0|[1-9][0-9]?[0-9]?/", "[CALL_ID]": "/[a-zA-Z0-9]{9}/"}
"""Patterns of the id after a function's name: a number (Kimi), nine letters or digits (Mistral)."""
_NOTES = ANNOTATIONS - {"x-guidance"}
_OBJECT = _NOTES | {"type", "properties", "required", "additionalProperties"}
_ARRAY = _NOTES | {"type", "items", "minItems", "maxItems"}
_TEXT = _NOTES | {"type", "minLength", "maxLength"}
_NUMBER = _NOTES | {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_MOST_REFERENCES = 16
_MOST_BRANCHES = 4096
"""The most schemas in `anyOf` lists of all tools together. With more, a call is a JSON object."""
_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""The pattern of property names that the schema does not list. The length of a name is limited,
because a weak model may continue a name for ever."""


class _UnfitError(Exception):
    """Raised if the model's form of tool calls cannot express a schema."""


class CallGrammar:
    """Writes Lark grammars for forced tool calls. `style` is the model's form of tool calls."""

    def __init__(
        self,
        style: OutputStyle,
        added_tokens: Mapping[str, int],
        end_token_ids: frozenset[int],
    ) -> None:
        self._was_object = style.form == TAGGED
        self._style = style.as_elements
        self._has_lines = self._style.key_after.endswith("\n")
        self._added = added_tokens
        self._ends = {name for name, token_id in added_tokens.items() if token_id in end_token_ids}
        self._rules: list[str] = []
        self._tool = ToolSchema("", {}, True)
        self._options: dict[str, Any] = {}
        self._num_branches = self._num_chars = 0
        self._by_reference: dict[str, str] = {}
        self._terminals: dict[tuple[str, str], str] = {}

    def text(self, tools: Sequence[ToolSchema], *, is_begun: bool = False) -> str:
        """Returns a grammar that accepts one call of any of the tools.

        `is_begun` is True if an earlier release of promptq wrote the first tokens of the call. That
        release wrote no call ids, and it wrote a JSON object where this release writes tags.
        """
        calls = []
        for tool in tools:
            self._tool, self._options = tool, options_of(tool.strict)
            self._by_reference, self._terminals = {}, {}
            num_rules = len(self._rules)
            try:
                call = self._call(is_begun)
            except _UnfitError:
                del self._rules[num_rules:]
                call = self._object(OutputStyle())
            calls.append(self._rule(call))
        return "\n".join(["%llguidance {}", f"start: {' | '.join(calls)}", *self._rules])

    def _rule(self, body: str) -> str:
        self._rules.append(f"r{len(self._rules)}: {body}")
        return f"r{len(self._rules) - 1}"

    def _terms(self, text: str) -> str:
        return terms(text, self._added)

    def _call(self, is_begun: bool) -> str:
        style, name = self._style, self._tool.name
        before = style.opening + style.before
        if not (is_begun or style.can_name(name)):
            if style.has_pairs:
                raise _UnfitError
            raise ValueError(f"the model's calls cannot name a tool {name[:80]!r}")
        if style.form == CHANNELS:
            return self._channel_call()
        if style.form == NAMED:
            name_end = "" if is_begun else style.name_end
            head = self._terms(before + name + name_end)
            number, middle = _IDS.get(name_end, ""), self._terms(style.middle)
            after = self._terms(style.after + style.closing)
            return f"{head} {number} {middle} {self._json(self._tool.parameters)} {after}"
        if not style.has_pairs or (is_begun and self._was_object):
            return self._object(style)
        arguments = self._literals() if style.form == LITERALS else self._elements()
        head = self._terms(before + name + style.middle)
        return f"{head} {arguments} {self._terms(style.after + style.closing)}"

    def _object(self, style: OutputStyle) -> str:
        marks = style if style.form == OBJECT else OutputStyle()
        name = f'"{marks.name_key}": {json.dumps(self._tool.name)}'
        head = f'{{{name}, "{marks.arguments_key}": '
        before = self._terms(marks.opening + marks.before + head)
        after = self._terms("}" + marks.after + marks.closing)
        return f"{before} {self._json(self._tool.parameters)} {after}"

    def _channel_call(self) -> str:
        """Returns a grammar term for a call in gpt-oss' form. The channel's name comes before the
        function's name, as models write calls, or after it, as in chat templates."""
        style = self._style
        tool, channel = style.prelude + self._tool.name, f"{style.before}commentary"
        heads = [self._terms(text) for text in (channel + tool, tool + channel)]
        kinds = [self._terms(text) for text in (" <|constrain|>json", " json", "")]
        after = "" if style.after in self._ends else self._terms(style.after)
        kind = " | ".join(kind for kind in kinds if kind)
        return (
            f"({' | '.join(heads)}) ({kind})? {self._terms(style.middle)}"
            f" {self._json(self._tool.parameters)} {after}"
        )

    def _json(self, schema: Any) -> str:
        """Returns a grammar term for JSON that matches `schema`, a part of the tool's parameters.
        References in `schema` point into the whole parameters."""
        schema = dict(schema) if isinstance(schema, Mapping) else schema
        if schema is True:
            schema = {}
        root = self._tool.parameters
        if schema != root and all_references(schema):
            schema = {**_moved(schema), "$defs": {"root": _moved(root)}}
        text = f"%json {json.dumps({**schema, 'x-guidance': self._options})}"
        self._num_chars += len(text)
        if self._num_chars > MAX_GRAMMAR_CHARS and schema != root:
            raise _UnfitError  # each such term has a copy of the whole schema
        return text

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Returns the schema, or its target if the schema is a `$ref`. Raises _UnfitError."""
        for _ in range(_MOST_REFERENCES):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                break
            if "$ref" not in schema:
                return schema
            if schema.keys() - _NOTES != {"$ref"}:
                break
            schema = target_of(schema["$ref"], self._tool.parameters)
        raise _UnfitError

    def _pairs(self, schema: Any) -> tuple[dict[str, Any], list[str], Any]:
        """Returns an object's `properties`, `required`, and the schema of other properties."""
        schema = self._resolved(schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        kinds = schema.get("type", "object")
        if (
            schema.keys() - _OBJECT
            or "object" not in (kinds if isinstance(kinds, list) else [kinds])
            or not (isinstance(properties, dict) and isinstance(required, list))
            or not all(isinstance(name, str) and name in properties for name in required)
        ):
            raise _UnfitError
        return properties, required, others

    # Elements: each value stands between two marks, as plain text or as JSON.

    def _elements(self) -> str:
        style = self._style
        properties, required, others = self._pairs(self._tool.parameters)
        written = []
        for name, schema in properties.items():
            if name != name.strip() or not name or style.key_after.strip()[0] in name:
                raise _UnfitError
            element = self._rule(f"{self._terms(style.key_before + name)} ({self._value(schema)})")
            written.append(element if name in required else f"{element}?")
        if others is not False:
            key = f"{self._terms(style.key_before)} {self._other_key(properties)}"
            written.append(f"({key} ({self._value(others)}))*")
        body = " ".join(written)
        if style.key_after_json and not required:  # a call without arguments has an empty line
            body = f'({body} | "\\n")' if body else '"\\n"?'
        return body

    def _other_key(self, properties: Mapping[str, Any]) -> str:
        """Returns a grammar term for a name other than those of the properties."""
        number = len(self._rules)
        names = "|".join(map(_regex, properties))
        self._rules.append(f"K{number}: /{_KEY}/" + (f" & ~/({names})/" if names else ""))
        return f"K{number}"

    def _value(self, schema: Any) -> str:
        """Returns a grammar term for an argument's value and the marks around it."""
        style = self._style
        texts, json_schemas = self._split(schema)
        after = style.value_after
        as_text = [f"{self._terms(style.key_after)} {text}" for text in texts]
        if style.key_after_json:
            before = self._terms(style.key_after_json)
        else:
            before = self._terms(style.key_after)
            if json_schemas and not all(texts.values()):
                # Readers of calls parse a text as JSON if the schema allows the type of that JSON.
                any_text = self._text({}, style.value_after)
                if [*texts] != [any_text] or not all(map(_is_type_alone, json_schemas)):
                    raise _UnfitError
                json_schemas = []
        as_json = [f"{before} {self._json(each)} {self._terms(after)}" for each in json_schemas]
        if self._has_lines:
            for words in map(_python_words, json_schemas):
                as_json += [f'{before} "{word}" {self._terms(after)}' for word in words]
        if not (as_text or as_json):
            raise _UnfitError
        return " | ".join([*as_text, *as_json])

    def _split(self, schema: Any, depth: int = 0) -> tuple[dict[str, bool], list[dict[str, Any]]]:
        """Returns grammar terms for the strings that `schema` allows, and schemas of other allowed
        values. A term includes the mark that ends the string, such as `</parameter>`. The
        dictionary maps a term to True if no string of the term can be parsed as JSON. `depth` is
        the number of `anyOf` around `schema`."""
        self._num_branches += 1
        if depth > _MOST_REFERENCES or self._num_branches > _MOST_BRANCHES:
            raise _UnfitError
        resolved, texts = self._resolved(schema), dict[str, bool]()
        branches = resolved.get("anyOf")
        if isinstance(branches, list) and not resolved.keys() - _NOTES - {"anyOf"}:
            others: list[dict[str, Any]] = []
            for branch in branches:
                of_branch = self._split(branch, depth + 1)
                texts |= of_branch[0]
                others += of_branch[1]
            return texts, others
        values = [resolved["const"]] if "const" in resolved else resolved.get("enum")
        if isinstance(values, list):
            self._check(resolved, _NOTES | {"type", "enum", "const"})
            notes = {key: value for key, value in resolved.items() if key not in ("enum", "const")}
            is_typed = "type" in resolved
            allowed = types_of(resolved, self._tool.parameters) if is_typed else frozenset(_TYPES)
            listed = [value for value in values if isinstance(value, str) and "string" in allowed]
            rest = [value for value in values if not isinstance(value, str)]
            if rest and allowed == {"string"}:
                raise _UnfitError
            if listed:
                text = self._literal_text(listed, self._style.value_after)
                texts[text] = not any(map(_is_like_json, listed))
            return texts, [{**notes, "enum": rest}] if rest else []
        kinds = self._kinds(resolved)
        other_kinds = [kind for kind in _TYPES if kind in kinds and kind != "string"]
        if "string" in kinds:
            self._check(resolved, _TEXT | _OBJECT | _ARRAY | _NUMBER if other_kinds else _TEXT)
            texts[self._text(resolved, self._style.value_after)] = False
        return texts, [{**resolved, "type": other_kinds}] if other_kinds else []

    def _text(self, schema: Mapping[str, Any], mark: str) -> str:
        """Returns a grammar term for a string that `schema` allows, up to and including `mark`."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        length = f"{{{least},{most}}}" if "minLength" in schema or "maxLength" in schema else "*"
        return self._up_to(f"/(?s:.{length})/", mark)

    def _literal_text(self, texts: Sequence[str], mark: str) -> str:
        if any(mark.strip() in text for text in texts):
            raise _UnfitError
        return self._up_to(f"({' | '.join(map(json.dumps, texts))})", mark)

    def _up_to(self, content: str, mark: str) -> str:
        """Returns a grammar term for `content` and then `mark`, which occurs only at the end."""
        # One terminal has the content and the first letters of the mark, so that no letter of the
        # mark counts as content. The mark's added tokens come after the terminal, because a
        # terminal cannot contain them.
        if known := self._terminals.get((content, mark)):
            return known
        pieces = [piece for piece in any_of(tuple(self._added)).split(mark) if piece]
        letters = json.dumps(pieces.pop(0)) if pieces[0] not in self._added else ""
        number = len(self._rules)
        self._rules.append(f"C{number}: {content} & ~/(?s:.*){_regex(mark.strip())}(?s:.*)/")
        self._rules.append(f"T{number}: C{number} {letters}")
        found = f"T{number} {self._terms(''.join(pieces))}"
        self._terminals[content, mark] = found
        return found

    # Literals: values are written as in Python, or with the style's quotes, and may be nested.

    def _literals(self) -> str:
        key_after = self._style.key_after
        if not self._style.quote:
            properties, required, others = self._pairs(self._tool.parameters)
            if not all(name.isidentifier() for name in properties):
                raise _UnfitError
            pairs = [
                (f'"{name}{key_after}" ({self._python(schema)})', name in required)
                for name, schema in properties.items()
            ]
            return self._joined(pairs, self._other_pair(properties, others, self._python), '", "')
        return self._bare_pairs(self._tool.parameters)

    def _python(self, schema: Any) -> str:
        words = _python_words(self._resolved(schema))
        return " | ".join([self._json(schema), *(f'"{word}"' for word in words)])

    def _bare_pairs(self, schema: Any) -> str:
        """Returns a grammar term for an object's pairs, sorted by name as in chat templates."""
        properties, required, others = self._pairs(schema)
        if not all(re.fullmatch(r"[A-Za-z_][\w.-]*", name) for name in properties):
            raise _UnfitError
        pairs = [
            (f'"{name}:" {self._bare(properties[name])}', name in required)
            for name in sorted(properties, key=str.lower)
        ]
        return self._joined(pairs, self._other_pair(properties, others, self._bare), '","')

    def _other_pair(
        self, properties: Mapping[str, Any], others: Any, value: Callable[[Any], str]
    ) -> str:
        """Returns the name of a rule for a pair whose name is not in `properties`. `others` is the
        schema of the pair's value. If `others` is False, returns ''."""
        if others is False:
            return ""
        key = self._other_key(properties)
        return self._rule(f"{key} {json.dumps(self._style.key_after)} ({value(others)})")

    def _joined(self, pairs: list[tuple[str, bool]], other: str, comma: str) -> str:
        """Returns a grammar term for `pairs` of (term, is_required), in this order, and then any
        number of `other` pairs. The separator is `comma`."""
        more, first = "", ""
        if other:
            more, first = f"({comma} {other})*", f"({other} ({comma} {other})*)?"
        for body, is_required in reversed(pairs):
            pair = self._rule(body)
            begun = f"{pair} {more}"
            first = begun if is_required else f"({begun} | {first})" if first else f"({begun})?"
            more = f"{comma} {begun}" if is_required else f"({comma} {pair})? {more}"
            more, first = self._rule(more), self._rule(first)
        return first

    def _bare(self, schema: Any) -> str:
        """Returns the name of a rule for a value that `schema` allows, with strings in the style's
        quotes."""
        reference = schema.get("$ref") if isinstance(schema, dict) else "#any" * (schema is True)
        if isinstance(reference, str) and reference in self._by_reference:
            return self._by_reference[reference]
        rule = self._rule("")  # filled below, because the value may refer to its rule
        if isinstance(reference, str) and reference:
            self._by_reference[reference] = rule
        at = len(self._rules) - 1
        self._rules[at] = f"{rule}: {self._bare_body(self._resolved(schema))}"
        return rule

    def _bare_body(self, schema: dict[str, Any]) -> str:
        branches = schema.get("anyOf")
        if isinstance(branches, list) and not schema.keys() - _NOTES - {"anyOf"}:
            return " | ".join(map(self._bare, branches))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            self._check(schema, _NOTES | {"type", "enum", "const"})
            return " | ".join(map(self._bare_constant, values))
        kinds = self._kinds(schema)
        if len(kinds) > 1:
            self._check(schema, _NOTES | {"type"})
        return " | ".join(self._bare_of(kind, schema) for kind in _TYPES if kind in kinds)

    def _bare_of(self, kind: str, schema: dict[str, Any]) -> str:
        match kind:
            case "string":
                self._check(schema, _TEXT)
                return f"{self._terms(self._style.quote)} {self._text(schema, self._style.quote)}"
            case "boolean":
                self._check(schema, _NOTES | {"type"})
                return '"true" | "false"'
            case "null":
                self._check(schema, _NOTES | {"type"})
                return '"null" | "None"'  # the chat template writes None
            case "object":
                return f'"{{" {self._bare_pairs({**schema, "type": "object"})} "}}"'
            case "array":
                self._check(schema, _ARRAY)
                return self._bare_list(schema)
        self._check(schema, _NUMBER)
        return self._json({**schema, "type": kind})

    def _bare_list(self, schema: dict[str, Any]) -> str:
        item = self._bare(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        some = f"{item} {more}"
        return f'"[" {some if least else f"({some})?"} "]"'

    def _bare_constant(self, value: Any) -> str:
        if isinstance(value, str):
            quote = self._style.quote
            return f"{self._terms(quote)} {self._literal_text([value], quote)}"
        if isinstance(value, dict | list):
            raise _UnfitError
        return '"null" | "None"' if value is None else f'"{json.dumps(value)}"'

    def _kinds(self, schema: dict[str, Any]) -> frozenset[str]:
        """Returns the types that a schema allows. Raises _UnfitError if these are not known."""
        if kinds := types_of(schema, self._tool.parameters):
            return kinds
        self._check(schema, _NOTES)
        return frozenset(_TYPES)

    def _check(self, schema: dict[str, Any], known: frozenset[str]) -> None:
        if schema.keys() - known:
            raise _UnfitError


def _moved(schema: Any) -> Any:
    """Returns the schema with each reference to `#` replaced by one to `#/$defs/root`."""
    if isinstance(schema, dict):
        return {
            key: value.replace("#", "#/$defs/root", 1)
            if key == "$ref" and isinstance(value, str)
            else _moved(value)
            for key, value in schema.items()
        }
    return [_moved(item) for item in schema] if isinstance(schema, list) else schema


def _is_type_alone(schema: dict[str, Any]) -> bool:
    return not schema.keys() - _NOTES - {"type"}


def _is_like_json(text: str) -> bool:
    """Whether the text can be parsed as JSON, or is a constant of Python."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text in ("True", "False", "None")
    return True


def _python_words(schema: dict[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    if not _is_type_alone(schema):
        return []
    booleans = ["True", "False"] if "boolean" in kinds else []
    return booleans + (["None"] if "null" in kinds else [])


def _regex(text: str) -> str:
    """Returns a regular expression, in Lark's syntax, that matches exactly this text."""
    return re.sub(r"([][.+*?(){}|^$\\/])", r"\\\1", text).replace("\n", "\\n")
