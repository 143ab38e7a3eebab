"""Grammars by llguidance: from what a request wants its output to be to masks over the vocabulary.

The library is imported, and told of the vocabulary, when a request first needs it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.output_format import JsonOutput, Output, ToolCallOutput
from promptq.shared.protocol.tool_call_style import ToolCallStyle
from promptq.worker.engine.api.grammar import Grammar, GrammarError
from promptq.worker.text.chat_template import tool_call_style
from promptq.worker.text.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

WHITESPACE = "[ ]"
"""At most one of these between the tokens of JSON: indentation costs tokens and says nothing, and
where there is no bound a weak model gets lost."""

_MAX_COMPILED = 256
_MAX_THREADS = 4
_SILENT = 0
_MAX_REASON = 300


class Grammars:
    """What a worker's model may be asked to write. Thread-safe.

    A schema is compiled once, as long as it is among the last 256 that were used.
    """

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._masker: LLMasker | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, wanted: Output, end_token_ids: frozenset[int]) -> LLGrammar:
        """The grammar of an output that has no token yet and may end with these.

        Raises InvalidRequestError with the library's reason if it refuses the schema.
        """
        with self._lock:
            masker = self._masker = self._masker or self._make_masker(wanted.field)
            matcher = self._compile(wanted, masker).deep_copy()
        return LLGrammar(matcher, masker, end_token_ids)

    def _make_masker(self, field: str) -> LLMasker:
        from llguidance import LLTokenizer

        try:
            content = self._tokenizer.as_json()
            if content is None:
                raise ValueError("it is not one of the tokenizers library")
            vocabulary = LLTokenizer(
                content,
                n_vocab=max(self._vocab_size, self._tokenizer.num_tokens),
                eos_token=sorted(self._end_token_ids) or None,
            )
        except ValueError as error:
            reason = f"the model's tokenizer cannot be told to the grammar library: {error}"
            raise _refusal(field, reason) from error
        return LLMasker(vocabulary)

    def _compile(self, wanted: Output, masker: LLMasker) -> LLMatcher:
        try:
            text = _grammar_text(wanted, tool_call_style(self._tokenizer.chat_template))
        except ValueError as error:
            raise _refusal(wanted.field, f"the schema is refused: {error}") from error
        if (known := self._compiled.get(text)) is not None:
            self._compiled.move_to_end(text)
            return known
        matcher = masker.compile(text)
        if matcher.is_error():
            raise _refusal(wanted.field, f"the schema is refused: {_reason(matcher)}")
        self._compiled[text] = matcher
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return matcher


class LLMasker:
    """See Masker. Beside masks it knows the vocabulary."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        from llguidance import LLExecutor

        self._vocabulary = vocabulary
        num_threads = max(1, min((os.cpu_count() or 1) // 2, _MAX_THREADS))
        self._executor: LLExecutor = LLExecutor(num_threads=num_threads)
        self.model_ends = frozenset(vocabulary.eos_tokens)
        """What the library lets an output end with."""
        self.num_words = (vocabulary.vocab_size + 31) // 32

    def compile(self, text: str) -> LLMatcher:
        """A matcher at the beginning of a grammar; what is wrong with that, it tells itself."""
        from llguidance import LLMatcher

        return LLMatcher(self._vocabulary, text, log_level=_SILENT)

    def fill(self, grammars: Sequence[Grammar], masks: npt.NDArray[np.int32]) -> dict[int, str]:
        ours = cast("Sequence[LLGrammar]", grammars)
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(ours)]
        self._executor.unsafe_compute_mask_ptr(
            matchers, masks.ctypes.data, masks.strides[0], len(masks)
        )
        for row, grammar in enumerate(ours):
            grammar.correct_ends(masks[row])
        # A matcher that has failed allows an end, which would pass for a whole output.
        return {row: _reason(matcher) for matcher, row in matchers if matcher.is_error()}


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
            raise GrammarError(_reason(self.matcher))

    def correct_ends(self, mask: npt.NDArray[np.int32]) -> None:
        """Make up for end tokens of the request that are not those of the model."""
        if not (self._ends_to_allow or self._ends_to_ban):
            return
        may_end = self.matcher.is_accepting()
        bits = mask.view("uint8")
        for token_id in self._ends_to_ban:
            bits[token_id // 8] &= 255 - (1 << token_id % 8)
        for token_id in self._ends_to_allow:
            bit = 1 << token_id % 8
            bits[token_id // 8] = bits[token_id // 8] & (255 - bit) | (bit if may_end else 0)


def _grammar_text(wanted: Output, style: ToolCallStyle) -> str:
    from llguidance import LLMatcher

    if isinstance(wanted, JsonOutput):
        return LLMatcher.grammar_from_json_schema(
            wanted.schema, overrides=cast("Any", _options(wanted.strict))
        )
    return LLMatcher.grammar_from_lark(_tool_calls(wanted, style))


def _tool_calls(wanted: ToolCallOutput, style: ToolCallStyle) -> str:
    """Lark, in which the parameters of each tool stay a whole schema, for their references."""
    calls, rules = [], []
    for index, tool in enumerate(wanted.tools):
        start = f'{{"name": {json.dumps(tool.name)}, "{style.arguments_key}": '
        schema = {**tool.parameters, "x-guidance": _options(tool.strict)}
        before, after = json.dumps(style.before + start), json.dumps("}" + style.after)
        calls.append(f"call_{index}")
        rules.append(f"call_{index}: {before} %json {json.dumps(schema)} {after}")
    return "\n".join(["%llguidance {}", f"start: {' | '.join(calls)}", *rules])


def _options(strict: bool) -> dict[str, Any]:
    return {"lenient": not strict, "whitespace_pattern": WHITESPACE}


def _reason(matcher: LLMatcher) -> str:
    """The library's message without the dump of its state, on one line."""
    message = " ".join(matcher.get_error().split("<state>")[0].split())
    return message if len(message) <= _MAX_REASON else message[: _MAX_REASON - 3] + "..."


def _refusal(field: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {reason}", field=field, error_type="unsupported")
