"""The interface of grammars, which determine the tokens that may come next in a sequence. The
engine imports no grammar library.

A `Grammar` has the state after one sequence's output. The engine passes each token to the grammar,
and ends the sequence when no token may follow. During a forward pass, one call of `Masker.fill`
computes the masks of all sequences in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GrammarError(Exception):
    """Raised if a token does not fit the grammar, or if the grammar became too complex."""


class Grammar(Protocol):
    """The state of a grammar after one sequence's output so far. Only one thread may use it at a
    time."""

    @property
    def is_complete(self) -> bool:
        """Whether the output so far matches the grammar, and no further token may follow."""

    @property
    def source(self) -> str | None:
        """The whole grammar as Lark text for llguidance; None if there is no such text.

        An engine may compute masks from this text and the tokenizer's end token. Then the engine
        allows all tokens that `Masker.fill` allows, and perhaps more. For example, llguidance older
        than 1.9 allows repeats of white space that `Masker.fill` allows once.
        """

    @property
    def masker(self) -> Masker:
        """The object that computes masks. All grammars of a model share one masker."""

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next, so that `Masker.fill` would set the token's bit."""

    def accept(self, token_id: int) -> None:
        """Add the next output token, which must not be an end token. Raises GrammarError if the
        token does not fit."""


class Masker(Protocol):
    """Computes masks: for each sequence, the tokens that may come next."""

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in a mask: the vocabulary's size divided by 32, rounded up."""

    def fill(self, grammars: Sequence[Grammar], masks: npt.NDArray[np.int32]) -> dict[int, str]:
        """Write one row of `masks` [len(grammars), num_words] for each grammar.

        Bit i % 32 of word i / 32 is set if token i may come next. The grammar decides which text
        tokens may come next. An end token of the request may come next if the output may end here.
        Returns the error messages of failed rows, by row number. Releases the interpreter lock
        during the computation.
        """
