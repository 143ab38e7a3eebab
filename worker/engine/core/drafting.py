"""Guesses the next tokens of a sequence from its own text (prompt lookup, Saxena 2023).

A step with a few more rows costs little more, as long as it mostly waits for the weights. So a
decode may carry drafted tokens: those that followed the last occurrence of its last tokens in the
prompt or output. The step also samples after each of them, and a drafted token is accepted if and
only if the same token would have been sampled without it. A wrong draft costs only time, and this
module limits how much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_ROWS = 16
"""The most rows of a step with drafts, drafted ones included."""

_DRAFT_COST = 1 / 4
_ROW_COST = 1 / 32
"""The cost of the first drafted row, and of each further one, as a share of a step. The first costs
more, because some libraries multiply one row differently. The values are high for most machines and
dtypes."""

_ALLOWANCE = 0.01
"""The cost that failing drafts may have, as a share of all steps."""
_FIRST_CREDIT = 0.5
_MAX_CREDIT = 1.0
"""Credits are in tokens. A higher limit would waste more drafts on a text that no longer repeats
itself."""
_FIRST_LENGTH = 3
_LONGEST, _SHORTEST = 4, 2
"""Numbers of tokens that have to match. A match of a single token means too little."""


class PromptLookup:
    """Finds tokens that followed earlier occurrences of a text's last ones, in constant time."""

    def __init__(self) -> None:
        self._next_of: dict[tuple[int, ...], int] = {}  # n-gram: place after its last occurrence
        self._num_indexed = 0

    def find(self, token_ids: list[int], count: int) -> list[int]:
        """Returns `count` tokens that may follow; none if the end of the text is new.

        `token_ids` may only grow between calls. The longest match wins, then the latest. A match
        that reaches the end of the text repeats itself.
        """
        end = len(token_ids)
        for place in range(max(self._num_indexed, _SHORTEST), end):
            for size in range(_SHORTEST, min(_LONGEST, place) + 1):
                self._next_of[tuple(token_ids[place - size : place])] = place
        self._num_indexed = end
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            start = self._next_of.get(tuple(token_ids[end - size :])) if size < end else None
            if start is not None:
                draft = token_ids[start : start + count]
                while len(draft) < count:
                    draft += draft[: count - len(draft)]
                return draft
        return []


@dataclass(slots=True)
class Drafter:
    """Drafts for one sequence, as many tokens as pay off.

    Drafts are paid for from a credit. Each accepted token adds to the credit, and each step adds a
    little. So drafts that fail cost at most that little, and drafts that are right become longer.
    """

    max_drafted: int
    """The most drafted tokens in a step."""
    begin: int
    end: int
    """Drafts are made while the sequence has `begin` tokens or more, and never past `end`."""
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _length: int = _FIRST_LENGTH
    _credit: float = _FIRST_CREDIT

    def draft(self, token_ids: list[int], num_rows: int, num_sequences: int) -> list[int]:
        """Draft at most `num_rows` tokens, for a step of `num_sequences` sequences."""
        affordable = int((self._credit - _DRAFT_COST) / (_ROW_COST * num_sequences))
        useful = self.end - len(token_ids) - 1  # the last token is sampled, not drafted
        count = min(self._length, self.max_drafted, num_rows, affordable, useful)
        if count < 1 or len(token_ids) < self.begin:
            return []
        return self._lookup.find(token_ids, count)

    def settle(self, num_drafted: int, num_accepted: int, num_sequences: int) -> None:
        """Account for a decode of the sequence, with or without a draft."""
        credit = self._credit + _ALLOWANCE + num_accepted
        if num_drafted:
            credit -= _DRAFT_COST + _ROW_COST * num_drafted * num_sequences
            self._length = 2 * num_accepted + 1
        self._credit = min(credit, _MAX_CREDIT)
