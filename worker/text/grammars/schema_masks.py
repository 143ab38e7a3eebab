"""Turns a request's output format into masks (the tokens that may come next) with llguidance.

The first request with an output format imports llguidance and loads the vocabulary.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, cast

import numpy as np

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import (
    ChoiceOutput,
    GrammarOutput,
    JsonOutput,
    Output,
    RegexOutput,
    ToolCallOutput,
)
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.schema_types import types_of
from promptq.worker.engine.api.grammar import Grammar, GrammarError
from promptq.worker.text.grammars.call_grammar import CallGrammar
from promptq.worker.text.grammars.closed_schemas import closed
from promptq.worker.text.grammars.llguidance_calls import (
    Vocabulary,
    compile_grammar,
    lark_of,
    reason_of,
    schema_grammar,
)
from promptq.worker.text.grammars.plain_schemas import plain
from promptq.worker.text.grammars.refusals import placed_schemas, refusal_message
from promptq.worker.text.grammars.schema_patterns import (
    MAX_COMBINED_PATTERNS,
    num_combined_patterns,
    num_patterns_of_lark,
)
from promptq.worker.text.grammars.terms import MAX_GRAMMAR_CHARS, choice_grammar
from promptq.worker.text.grammars.vetting import NotVettedError, Vetter
from promptq.worker.text.output_styles import style_of
from promptq.worker.text.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MAX_COMPILED = 256
_MAX_REFUSED = 1024
_MAX_CACHED_CHARS = 2**21
"""The most characters of all cached grammars. A character takes up to 40 bytes."""
_MAX_THREADS = 4
_CLOSED_KINDS = (frozenset({"object"}), frozenset({"array"}), frozenset({"object", "array"}))


class TakesLongError(Exception):
    """Raised before work that may take so long that other requests should not wait for it."""


class Grammars:
    """Compiles grammars for the output formats of requests. Thread-safe.

    The 256 grammars that were used last stay compiled, or fewer if they are large. With `vets`, a
    new grammar is first compiled in a separate process with limits on time and memory. `style` is
    the form of forced tool calls; by default, the tokenizer's chat templates determine it.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        vocab_size: int,
        end_token_ids: frozenset[int],
        *,
        vets: bool = False,
        style: OutputStyle | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._vets = vets
        self._masker: LLMasker | None = None
        self._vetter: Vetter | None = None
        self._known: OrderedDict[bytes, tuple[LLMatcher, str]] = OrderedDict()  # (matcher, text)
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # error messages
        self._lock = threading.Lock()  # guards the fields from `_masker` on

    def start(
        self, wanted: Output, end_token_ids: frozenset[int], *, only_known: bool = False
    ) -> LLGrammar:
        """Returns the grammar for an output, in the state before the first token. The output may
        end with `end_token_ids`.

        Raises InvalidRequestError, with the reason, if llguidance refuses the schema or if the
        schema exceeds a limit. With `only_known`, raises TakesLongError for a new grammar.
        """
        if only_known and self._masker is None:
            raise TakesLongError
        masker = self._set_up(wanted.field)
        matcher, text = self._compile(wanted, masker, only_known)
        is_same = _ends_by_itself(wanted) or end_token_ids == {self._tokenizer.end_token_id}
        return LLGrammar(matcher.deep_copy(), masker, end_token_ids, text if is_same else None)

    def close(self) -> None:
        """End the process that tests new grammars, if there is one."""
        if self._vetter is not None:
            self._vetter.close()

    def _set_up(self, field: str) -> LLMasker:
        with self._lock:
            if self._masker is None:
                if (content := self._tokenizer.as_json()) is None:
                    raise _not_possible(field, "it is not one of the tokenizers library")
                num_tokens = max(self._vocab_size, self._tokenizer.num_tokens)
                vocabulary = Vocabulary(content, num_tokens, sorted(self._end_token_ids))
                self._vetter = Vetter(vocabulary) if self._vets else None
                try:
                    self._masker = LLMasker(vocabulary.load())
                except ValueError as error:
                    raise _not_possible(field, str(error)) from error
            return self._masker

    def _text(self, wanted: Output) -> str:
        if isinstance(wanted, GrammarOutput):
            what = "grammar that combines (&)"
            counts = [num_patterns_of_lark(wanted.grammar)]
        else:
            what = "schema that combines others (allOf, ...)"
            counts = [num_combined_patterns(schema) for _, schema, _ in placed_schemas(wanted)]
        if (count := max(counts, default=0)) > MAX_COMBINED_PATTERNS:
            raise _error(
                wanted.field,
                f"{wanted.field}: takes too long to compile: a {what} may have"
                f" {MAX_COMBINED_PATTERNS} patterns at most, and this one has {count}",
            )
        try:
            text = self._grammar_text(wanted)
        except ValueError as error:
            raise _error(wanted.field, refusal_message(wanted, str(error), lambda _: "")) from error
        _check_length(len(text), wanted.field)
        return text

    def _grammar_text(self, wanted: Output) -> str:
        from llguidance import LLMatcher

        if isinstance(wanted, JsonOutput):
            return schema_grammar(wanted.schema, wanted.strict)
        if isinstance(wanted, GrammarOutput):
            return LLMatcher.grammar_from_lark(wanted.grammar)
        ours = self._tokenizer
        if isinstance(wanted, RegexOutput):
            if (len(wanted.regex) - len(wanted.regex.rstrip("\\"))) % 2:
                # llguidance would drop this backslash.
                raise ValueError("it ends with a backslash, which escapes nothing")
            return LLMatcher.grammar_from_regex(wanted.regex)
        if isinstance(wanted, ChoiceOutput):
            grammar = choice_grammar(wanted.texts, ours.added_tokens, ours.special_tokens)
            return LLMatcher.grammar_from_lark(grammar)
        style = self._style or style_of(ours)
        calls = CallGrammar(style, ours.added_tokens, self._end_token_ids)
        return LLMatcher.grammar_from_lark(calls.text(wanted.tools, is_begun=wanted.is_begun))

    def _compile(self, wanted: Output, masker: LLMasker, only_known: bool) -> tuple[LLMatcher, str]:
        key = sha256(repr(wanted).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
            if (refused := self._refused.get(key)) is not None:
                raise _error(wanted.field, refused)
        if only_known:
            raise TakesLongError
        wanted = _simplified(wanted)
        text = self._text(wanted)
        try:
            reason = self._vetter.vet(text) if self._vetter is not None else ""
        except NotVettedError as too_much:
            message = f"{wanted.field}: {too_much}"
            if not too_much.is_certain:
                raise InvalidRequestError(
                    f"{message}; send the request again",
                    field=wanted.field,
                    error_type="internal_error",
                ) from too_much
        else:
            if not reason:
                matcher = masker.compile(text)
                reason = reason_of(matcher)
            if not reason:
                self._remember(key, matcher, text)
                return matcher, text
            message = refusal_message(wanted, reason, partial(self._reason_against, masker))
        with self._lock:
            self._refused[key] = message
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
        raise _error(wanted.field, message)

    def _reason_against(self, masker: LLMasker, text: str) -> str:
        """Returns why llguidance refuses a grammar; empty if it is accepted or takes too long."""
        if self._vetter is None:
            return reason_of(masker.compile(text))
        try:
            return self._vetter.vet(text)
        except NotVettedError:
            return ""

    def _remember(self, key: bytes, matcher: LLMatcher, text: str) -> None:
        with self._lock:
            self._known[key] = matcher, text
            sum_of_chars = sum(len(known) for _, known in self._known.values())
            while len(self._known) > _MAX_COMPILED or sum_of_chars > _MAX_CACHED_CHARS:
                _, (_, oldest) = self._known.popitem(last=False)
                sum_of_chars -= len(oldest)


def _not_possible(field: str, reason: str) -> InvalidRequestError:
    message = f"{field}: the model's tokenizer does not suit the grammar library: {reason}"
    return _error(field, message)


class LLMasker:
    """Implements `Masker` with llguidance. Holds the vocabulary, and compiles grammars for it."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        from llguidance import LLExecutor

        self._vocabulary = vocabulary
        num_threads = max(1, min((os.cpu_count() or 1) // 2, _MAX_THREADS))
        self._executor: LLExecutor = LLExecutor(num_threads=num_threads)
        self.model_ends = frozenset(vocabulary.eos_tokens)
        """The end tokens of the model, which llguidance allows where an output may end."""
        self.num_words = (vocabulary.vocab_size + 31) // 32

    def compile(self, text: str) -> LLMatcher:
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
    """Implements `Grammar` with llguidance. `source` is `text` in Lark's form. Both are None if no
    inference server may use the grammar."""

    __slots__ = ("_all_ends", "_ends_to_allow", "_ends_to_ban", "_text", "masker", "matcher")

    def __init__(
        self,
        matcher: LLMatcher,
        masker: LLMasker,
        end_token_ids: frozenset[int],
        text: str | None = None,
    ) -> None:
        self._text = text
        self.matcher = matcher
        self.masker = masker
        self._all_ends = end_token_ids | masker.model_ends
        self._ends_to_allow = sorted(end_token_ids - masker.model_ends)
        self._ends_to_ban = sorted(masker.model_ends - end_token_ids)

    @property
    def source(self) -> str | None:
        return None if self._text is None else lark_of(self._text)

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped()

    def allows(self, token_id: int) -> bool:
        if token_id not in self._all_ends:
            if not self.matcher.validate_tokens([token_id]):
                return False
            forced = self.matcher.compute_ff_tokens()  # masks allow one spelling of a forced text
            return not forced or token_id == forced[0]
        masks = np.zeros((1, self.masker.num_words), np.int32)
        failed = self.masker.fill([self], masks)
        return not failed and bool(int(masks[0, token_id // 32]) >> token_id % 32 & 1)

    def accept(self, token_id: int) -> None:
        if not self.matcher.consume_token(token_id):
            raise GrammarError(reason_of(self.matcher))

    def correct_ends(self, mask: npt.NDArray[np.int32]) -> None:
        """Change a mask so that it allows the request's end tokens instead of the model's."""
        if not (self._ends_to_allow or self._ends_to_ban):
            return
        may_end = self.matcher.is_accepting()
        bits = mask.view("uint8")
        for token_id in self._ends_to_ban:
            bits[token_id // 8] &= 255 - (1 << token_id % 8)
        for token_id in self._ends_to_allow:
            bit = 1 << token_id % 8
            bits[token_id // 8] = bits[token_id // 8] & (255 - bit) | (bit if may_end else 0)


def _ends_by_itself(wanted: Output) -> bool:
    """Whether the output is complete without an end token, as with a JSON object."""
    if isinstance(wanted, JsonOutput):
        return types_of(wanted.schema, wanted.schema) in _CLOSED_KINDS
    return isinstance(wanted, ToolCallOutput)


def _simplified(wanted: Output) -> Output:
    """Returns the output format with its schemas changed by `plain` and `closed`. Raises
    InvalidRequestError if a schema or grammar is too long."""
    if isinstance(wanted, GrammarOutput):
        _check_length(len(wanted.grammar), wanted.field)
    for _, schema, _ in placed_schemas(wanted):
        _check_length(len(json.dumps(schema)), wanted.field)  # before more work is done on it
    if isinstance(wanted, JsonOutput):
        return replace(wanted, schema=closed(plain(wanted.schema)))
    if isinstance(wanted, ToolCallOutput):
        tools = [replace(tool, parameters=closed(plain(tool.parameters))) for tool in wanted.tools]
        return replace(wanted, tools=tuple(tools))
    return wanted


def _check_length(num_chars: int, field: str) -> None:
    if num_chars > MAX_GRAMMAR_CHARS:
        raise _error(
            field,
            f"{field}: {num_chars} characters are more than the {MAX_GRAMMAR_CHARS} allowed",
        )


def _error(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=field, error_type="unsupported")
