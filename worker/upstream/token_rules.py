"""The tokens that may come next in one sequence: its grammar, its bad words and `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from promptq.worker.engine.api.grammar import GrammarError
from promptq.worker.engine.api.messages import EngineRequest


class NoTokenError(Exception):
    """Raised if the limits of a request forbid all tokens."""


class TokenRules:
    """The rules of one request, for tokens that a server chooses. The native engine instead applies
    the same rules as masks before it samples."""

    def __init__(self, request: EngineRequest, output: Sequence[int], vocab_size: int) -> None:
        """Prepares the rules in the state after `output`, which the grammar has accepted."""
        self._grammar = request.grammar
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for bad in request.bad_token_sequences:
            if len(bad) > 1:
                self._words.setdefault(bad[-2], []).append(bad)
        self._banned = {bad[0] for bad in request.bad_token_sequences if len(bad) == 1}
        self._ends = request.end_token_ids
        self._min_tokens = request.params.min_tokens if self._ends else 0
        self._output = [*output]
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        """Whether the output matches the grammar, and no further token may follow."""
        return self._grammar is not None and self._grammar.is_complete

    @property
    def may_end(self) -> bool:
        """Whether the output may end here without an end token."""
        if len(self._output) < self._min_tokens:
            return False
        return self._grammar is None or any(map(self._grammar.allows, self._ends))

    def allow(self, token_id: int) -> bool:
        """Whether a token may come next."""
        if token_id in self._forbidden():
            return False
        return self._grammar is None or self._grammar.allows(token_id)

    def accept(self, token_id: int) -> None:
        """Apply the next token. Raises NoTokenError if the grammar becomes too complex."""
        self._output.append(token_id)
        if self._grammar is not None and token_id not in self._ends:
            try:
                self._grammar.accept(token_id)
            except GrammarError as error:
                raise NoTokenError(str(error)) from error

    def mask(self) -> npt.NDArray[np.bool_]:
        """Returns an array [vocab_size] that is True for each token that may come next. Raises
        NoTokenError if no token may come next."""
        mask = np.ones(self._vocab_size, bool)
        if self._grammar is not None:
            masker = self._grammar.masker
            words = np.zeros((1, masker.num_words), np.int32)
            if failed := masker.fill([self._grammar], words):
                raise NoTokenError(failed[0])
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            mask[: len(bits)] = bits[: len(mask)]
        mask[[token_id for token_id in self._forbidden() if token_id < len(mask)]] = False
        if not mask.any():
            raise NoTokenError("no token can be chosen, because of the request's limits")
        return mask

    def _forbidden(self) -> set[int]:
        """Returns the tokens that would complete a bad word, or end the output too early."""
        words = self._words.get(self._output[-1], ()) if self._output else ()
        whole = {bad[-1] for bad in words if tuple(self._output[1 - len(bad) :]) == bad[:-1]}
        early = self._ends if len(self._output) < self._min_tokens else frozenset()
        return self._banned | whole | early
