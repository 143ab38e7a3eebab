"""The engine's view of a grammar, from any library: which tokens may follow in a sequence.

A grammar is the state of one sequence. The engine passes each token to it, and stops the sequence
once nothing can follow. The sampler gets the masks of all rows at once, while the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GrammarError(Exception):
    """A grammar cannot continue: a token does not fit, or the grammar became too complex."""


class Grammar(Protocol):
    """The state of a grammar after one sequence's output. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the output matches, and no further token may follow."""
        ...

    @property
    def source(self) -> str | None:
        """Lark text of the whole grammar for llguidance. Another engine that masks by it, and whose
        end token is the tokenizer's, allows at least the tokens that `Masker.fill` does: before
        llguidance 1.9, `whitespace_pattern` stands for any number. None: there is no such text."""
        ...

    @property
    def masker(self) -> Masker:
        """Computes the masks. All grammars of a model have the same masker."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether `Masker.fill` sets a token's bit now."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the next output token, unless it is an end token. Raises GrammarError."""
        ...


class Masker(Protocol):
    """Computes which tokens may come next."""

    @property
    def num_words(self) -> int:
        """The number of words in a mask: a 32nd of the vocabulary, rounded up."""
        ...

    def fill(self, grammars: Sequence[Grammar], masks: npt.NDArray[np.int32]) -> dict[int, str]:
        """Write a row of `masks` [len(grammars), num_words] for each grammar.

        Bit i % 32 of word i / 32 is set if token i may come next. A token of text may come if the
        grammar allows it, and an end token of the request if the output may end here. Returns the
        reason for each row that failed. Releases the interpreter lock while it computes.
        """
        ...
