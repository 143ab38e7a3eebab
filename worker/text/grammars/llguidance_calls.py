"""Calls llguidance to compile a grammar, in a worker and in the process that tests new grammars.

This module imports little, so that the process starts quickly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WHITESPACE = "[ ]"
"""White space between the tokens of JSON: at most one space. Indentation wastes tokens, and without
a limit a weak model may write white space for ever."""
_SILENT = 0
_MAX_REASON = 300
_LISTING = re.compile(r"\n +\d+ \| ")
"""Matches the place in an error message where the listing of the grammar begins."""
_PATTERN = re.compile(r"(?<=regex parse error: ).* error: ")
"""Matches the refused pattern in an error message. `reason_of` removes it: patterns may be long."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer's data from which llguidance makes an LLTokenizer."""

    tokenizer_json: str
    num_tokens: int
    end_token_ids: list[int]

    def load(self) -> LLTokenizer:
        """Returns llguidance's tokenizer. Raises ValueError for an unusable vocabulary."""
        from llguidance import LLTokenizer

        ends = self.end_token_ids or None
        return LLTokenizer(self.tokenizer_json, n_vocab=self.num_tokens, eos_token=ends)


def compile_grammar(vocabulary: LLTokenizer, text: str) -> LLMatcher:
    """Returns a grammar's matcher before the first token. If the grammar is wrong, the matcher has
    an error instead (`reason_of`)."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary, text, log_level=_SILENT)


def options_of(strict: bool) -> dict[str, Any]:
    """Returns llguidance's options for a schema. A schema that is not `strict` may have keywords
    that llguidance cannot enforce."""
    return {"lenient": not strict, "whitespace_pattern": _WHITESPACE}


def schema_grammar(schema: dict[str, Any], strict: bool) -> str:
    """Returns llguidance's grammar, in JSON, for values that match `schema`. Raises ValueError if
    llguidance refuses the schema."""
    from llguidance import LLMatcher

    options = cast("Any", options_of(strict))
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def lark_of(text: str) -> str:
    """Returns a grammar as Lark text, from Lark text or from JSON that llguidance wrote."""
    header = "%llguidance {}\n"
    if text.startswith('{"grammars"'):
        (grammar,) = json.loads(text)["grammars"]
        schema = grammar.get("json_schema")
        return header + (grammar.get("lark_grammar") or f"start: %json {json.dumps(schema)}")
    return text if text.lstrip().startswith("%llguidance") else header + text


def reason_of(matcher: LLMatcher) -> str:
    """Returns the matcher's error message on one line, without the grammar and the state; empty if
    the matcher has no error."""
    message = _LISTING.split(matcher.get_error().split("<state>")[0])[0]
    message = _PATTERN.sub("", " ".join(message.split()))
    return message if len(message) <= _MAX_REASON else message[: _MAX_REASON - 3] + "..."
