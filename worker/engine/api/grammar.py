"""What the engine asks of a grammar: which tokens a sequence may have next, whatever library knows.

A grammar is the state of one sequence. The engine tells it each token and stops the sequence once
nothing can follow; the sampler asks for the masks of all rows at once, while the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GrammarError(Exception):
    """A grammar cannot go on: the token does not fit, or it became too complex to follow."""


class Grammar(Protocol):
    """Where one sequence's output is in what it must match. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the output matches and no further token can follow."""
        ...

    @property
    def masker(self) -> Masker:
        """What computes masks; the same for all grammars of a model."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the next output token; end tokens are not told. Raises GrammarError."""
        ...


class Masker(Protocol):
    """Computes which tokens may come next."""

    @property
    def num_words(self) -> int:
        """Words of a mask: a 32nd of the vocabulary, rounded up."""
        ...

    def fill(self, grammars: Sequence[Grammar], masks: npt.NDArray[np.int32]) -> dict[int, str]:
        """Write a row of `masks` [len(grammars), num_words] for each grammar.

        Bit i % 32 of word i / 32 is set if token i may come next: a token of text if the grammar
        allows it, an end token of the request if the output may end here. Gives what is wrong with
        the rows that failed, by row. Releases the interpreter lock while it computes.
        """
        ...
