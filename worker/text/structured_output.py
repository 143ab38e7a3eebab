"""Turns the output format that a request wants into masks over the vocabulary, with llguidance.

The library is imported, and gets the vocabulary, when a request first needs it.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, cast

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import (
    ChoiceOutput,
    JsonOutput,
    Output,
    RegexOutput,
    ToolCallOutput,
)
from promptq.shared.protocol.output_style import NAMED, OutputStyle
from promptq.worker.engine.api.grammar import Grammar, GrammarError
from promptq.worker.text.chat_template import style_of
from promptq.worker.text.grammar_compiler import Vocabulary, compile_grammar, reason_of
from promptq.worker.text.schemas.closed_schemas import closed
from promptq.worker.text.schemas.schema_patterns import MAX_COMBINED_PATTERNS, num_combined_patterns
from promptq.worker.text.schemas.schema_vetting import NotVettedError, Vetter
from promptq.worker.text.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

WHITESPACE = "[ ]"
"""At most one space between the tokens of JSON. Indentation costs tokens for nothing, and without
a limit a weak model may write white space for ever."""

_MAX_COMPILED = 256
_MAX_REFUSED = 1024
_MAX_GRAMMAR_CHARS = 2**18
_MAX_CACHED_CHARS = 2**21
"""The limit for all compiled grammars together. A character takes up to 40 bytes of memory."""
_MAX_THREADS = 4


class NewGrammarError(Exception):
    """A grammar is not known yet, and compiling it may take long."""


class Grammars:
    """Makes the grammars of the outputs that requests want. Thread-safe.

    The last 256 schemas that were used stay compiled, or fewer if they are large. With `vets`, a
    new schema is first tried out in a process that can be killed. Without it, all are trusted.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        vocab_size: int,
        end_token_ids: frozenset[int],
        *,
        vets: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._vets = vets
        self._masker: LLMasker | None = None
        self._vetter: Vetter | None = None
        self._known: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()  # and its length
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()  # for all of these

    def start(
        self, wanted: Output, end_token_ids: frozenset[int], *, only_known: bool = False
    ) -> LLGrammar:
        """The grammar of an output that has no token yet and may end with these end tokens.

        Raises InvalidRequestError, with the reason, if the library refuses the schema or if it
        exceeds a limit. With `only_known`, raises NewGrammarError if it had to be compiled.
        """
        if only_known and self._masker is None:
            raise NewGrammarError
        masker = self._set_up(wanted.field)
        matcher = self._compile(wanted, masker, only_known).deep_copy()
        return LLGrammar(matcher, masker, end_token_ids)

    def close(self) -> None:
        """End the process that tries out schemas."""
        if self._vetter is not None:
            self._vetter.close()

    def _set_up(self, field: str) -> LLMasker:
        with self._lock:
            if self._masker is None:
                vocabulary = self._vocabulary(field)
                self._vetter = Vetter(vocabulary) if self._vets else None
                try:
                    self._masker = LLMasker(vocabulary.load())
                except ValueError as error:
                    raise _untold(field, str(error)) from error
            return self._masker

    def _vocabulary(self, field: str) -> Vocabulary:
        content = self._tokenizer.as_json()
        if content is None:
            raise _untold(field, "it is not one of the tokenizers library")
        num_tokens = max(self._vocab_size, self._tokenizer.num_tokens)
        return Vocabulary(content, num_tokens, sorted(self._end_token_ids))

    def _text(self, wanted: Output) -> str:
        for schema in _schemas(wanted):
            _check_length(len(json.dumps(schema)), wanted.field)  # before more work is done on it
            if (count := num_combined_patterns(schema)) > MAX_COMBINED_PATTERNS:
                raise _refusal(
                    wanted.field,
                    f"takes too long to compile: a schema that combines others (allOf, ...) may"
                    f" have {MAX_COMBINED_PATTERNS} patterns at most, and this one has {count}",
                )
        try:
            text = self._grammar_text(wanted)
        except ValueError as error:
            raise _refusal(wanted.field, _refused(wanted, error)) from error
        _check_length(len(text), wanted.field)
        return text

    def _grammar_text(self, wanted: Output) -> str:
        from llguidance import LLMatcher

        if isinstance(wanted, JsonOutput):
            return LLMatcher.grammar_from_json_schema(
                closed(wanted.schema), overrides=cast("Any", _options(wanted.strict))
            )
        ours = self._tokenizer
        if isinstance(wanted, RegexOutput):
            # The library drops a backslash that escapes nothing.
            if (len(wanted.regex) - len(wanted.regex.rstrip("\\"))) % 2:
                raise ValueError("it ends with a backslash, which escapes nothing")
            return LLMatcher.grammar_from_regex(wanted.regex)
        if isinstance(wanted, ChoiceOutput):
            grammar = _choice(wanted, ours.added_tokens, ours.special_tokens)
            return LLMatcher.grammar_from_lark(grammar)
        style = style_of(ours).forced
        return LLMatcher.grammar_from_lark(_tool_calls(wanted, style, ours.added_tokens))

    def _compile(self, wanted: Output, masker: LLMasker, only_known: bool) -> LLMatcher:
        key = sha256(repr(wanted).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known[0]
            if (refused := self._refused.get(key)) is not None:
                raise _refusal(wanted.field, refused)
        if only_known:
            raise NewGrammarError
        text = self._text(wanted)
        try:
            error = self._vetter.vet(text) if self._vetter is not None else ""
        except NotVettedError as too_much:
            if not too_much.is_certain:
                raise InvalidRequestError(
                    f"{wanted.field}: {too_much}; send the request again",
                    field=wanted.field,
                    error_type="internal_error",
                ) from too_much
            self._refuse(key, str(too_much))
            raise _refusal(wanted.field, str(too_much)) from too_much
        if not error:
            matcher = masker.compile(text)
            error = reason_of(matcher)
        if error:
            reason = _refused(wanted, error)
            self._refuse(key, reason)
            raise _refusal(wanted.field, reason)
        self._remember(key, matcher, len(text))
        return matcher

    def _remember(self, key: bytes, matcher: LLMatcher, num_chars: int) -> None:
        with self._lock:
            self._known[key] = matcher, num_chars
            sum_of_chars = sum(count for _, count in self._known.values())
            while len(self._known) > _MAX_COMPILED or sum_of_chars > _MAX_CACHED_CHARS:
                _, (_, count) = self._known.popitem(last=False)
                sum_of_chars -= count

    def _refuse(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._refused[key] = reason
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)


def _untold(field: str, reason: str) -> InvalidRequestError:
    return _refusal(field, f"the model's tokenizer does not suit the grammar library: {reason}")


class LLMasker:
    """See Masker. It also holds the vocabulary, and compiles grammars for it."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        from llguidance import LLExecutor

        self._vocabulary = vocabulary
        num_threads = max(1, min((os.cpu_count() or 1) // 2, _MAX_THREADS))
        self._executor: LLExecutor = LLExecutor(num_threads=num_threads)
        self.model_ends = frozenset(vocabulary.eos_tokens)
        """The tokens with which the library lets an output end."""
        self.num_words = (vocabulary.vocab_size + 31) // 32

    def compile(self, text: str) -> LLMatcher:
        """See `compile_grammar`."""
        return compile_grammar(self._vocabulary, text)

    def fill(self, grammars: Sequence[Grammar], masks: npt.NDArray[np.int32]) -> dict[int, str]:
        ours = cast("Sequence[LLGrammar]", grammars)
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(ours)]
        self._executor.unsafe_compute_mask_ptr(
            matchers, masks.ctypes.data, masks.strides[0], len(masks)
        )
        for row, grammar in enumerate(ours):
            grammar.correct_ends(masks[row])
        # A matcher that has failed allows an end, and the output would then look complete.
        return {row: reason_of(matcher) for matcher, row in matchers if matcher.is_error()}


class LLGrammar:
    """See Grammar. The library also offers `rollback` and `validate_tokens`, for drafts."""

    __slots__ = ("_ends_to_allow", "_ends_to_ban", "masker", "matcher")

    def __init__(self, matcher: LLMatcher, masker: LLMasker, end_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.masker = masker
        self._ends_to_allow = sorted(end_token_ids - masker.model_ends)
        self._ends_to_ban = sorted(masker.model_ends - end_token_ids)

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        if not self.matcher.consume_token(token_id):
            raise GrammarError(reason_of(self.matcher))

    def correct_ends(self, mask: npt.NDArray[np.int32]) -> None:
        """Correct the mask if the end tokens of the request are not those of the model."""
        if not (self._ends_to_allow or self._ends_to_ban):
            return
        may_end = self.matcher.is_accepting()
        bits = mask.view("uint8")
        for token_id in self._ends_to_ban:
            bits[token_id // 8] &= 255 - (1 << token_id % 8)
        for token_id in self._ends_to_allow:
            bit = 1 << token_id % 8
            bits[token_id // 8] = bits[token_id // 8] & (255 - bit) | (bit if may_end else 0)


def _tool_calls(wanted: ToolCallOutput, style: OutputStyle, added_tokens: Mapping[str, int]) -> str:
    """A Lark grammar. The parameters of each tool stay one whole schema, for their references."""
    calls, rules = [], []
    for index, tool in enumerate(wanted.tools):
        if style.form == NAMED:
            head, tail = f"{tool.name}{style.middle}", ""
        else:
            name = f'"{style.name_key}": {json.dumps(tool.name)}'
            head, tail = f'{{{name}, "{style.arguments_key}": ', "}"
        before = _terms(style.opening + style.before + head, added_tokens)
        after = _terms(tail + style.after + style.closing, added_tokens)
        schema = {**closed(tool.parameters), "x-guidance": _options(tool.strict)}
        calls.append(f"call_{index}")
        rules.append(f"call_{index}: {before} %json {json.dumps(schema)} {after}")
    return "\n".join(["%llguidance {}", f"start: {' | '.join(calls)}", *rules])


def _choice(
    wanted: ChoiceOutput, added_tokens: Mapping[str, int], special_tokens: Mapping[str, int]
) -> str:
    """A Lark grammar. One terminal has all texts of letters: rules would make masks slow.

    Raises ValueError for a text with a special token, which is no text.
    """
    added = _any_of(tuple(added_tokens))
    letters: list[str] = []
    others: list[str] = []
    for text in dict.fromkeys(wanted.texts):
        if not (held := added.findall(text)):
            letters.append(json.dumps(text))
            continue
        for name in held:
            if name in special_tokens:
                raise ValueError(f"{shown(text)} holds {name}, a special token and no text")
        others.append(_terms(text, added_tokens))
    if not letters:
        return f"%llguidance {{}}\nstart: {' | '.join(others)}"
    start = " | ".join(["TEXT", *others])
    return f"%llguidance {{}}\nstart: {start}\nTEXT: {' | '.join(letters)}"


@lru_cache(maxsize=4)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Finds these names, the longest first; the group keeps them where a text is split."""
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(f"({any_name})" if names else "((?!))")


def _terms(text: str, added_tokens: Mapping[str, int]) -> str:
    """The text in a Lark grammar, where an added token must be named: its letters are others."""
    pieces = _any_of(tuple(added_tokens)).split(text)
    return " ".join(
        f"<[{added_tokens[piece]}]>" if piece in added_tokens else json.dumps(piece)
        for piece in pieces
        if piece
    )


def _schemas(wanted: Output) -> list[dict[str, Any]]:
    if isinstance(wanted, JsonOutput):
        return [wanted.schema]
    return [tool.parameters for tool in wanted.tools] if isinstance(wanted, ToolCallOutput) else []


def _check_length(num_chars: int, field: str) -> None:
    if num_chars > _MAX_GRAMMAR_CHARS:
        reason = f"{num_chars} characters are more than the {_MAX_GRAMMAR_CHARS} allowed"
        raise _refusal(field, reason)


def _refused(wanted: Output, error: object) -> str:
    forms = {RegexOutput: "regex", ChoiceOutput: "choice"}
    return f"the {forms.get(type(wanted), 'schema')} is refused: {error}"


def _options(strict: bool) -> dict[str, Any]:
    return {"lenient": not strict, "whitespace_pattern": WHITESPACE}


def _refusal(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", field=field, error_type="unsupported")
