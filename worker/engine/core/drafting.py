"""Guesses at a sequence's next tokens, made from its own text (prompt lookup, Saxena 2023).

A step that computes a few rows more costs little more, as long as weights are what it waits for. So
a decode may bring drafted tokens along: what its last tokens were followed by where they last stood
in prompt or output. The step samples behind each of them as well, and a drafted token is accepted
if and only if it is what would have been sampled without it. Only time is at stake, and how much of
it is bounded here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_ROWS = 16
"""Drafts are made only for steps that have no more rows than this, drafted ones included."""

_DRAFT_COST = 1 / 4
_ROW_COST = 1 / 32
"""What a drafted row adds to a step, as a share of it, and what the first of them adds: some
libraries multiply one row another way than several. High for most machines and dtypes."""

_ALLOWANCE = 0.01
"""What drafts that fail may cost, as a share of all steps."""
_FIRST_CREDIT = 0.5
_MAX_CREDIT = 1.0
"""In tokens, as all credit; the more there may be, the longer a text that has ceased to repeat
itself is drafted for in vain."""
_FIRST_LENGTH = 3
_LONGEST, _SHORTEST = 4, 2
"""Tokens that have to match. A single one means too little."""


class PromptLookup:
    """Finds what the last tokens of a text were followed by before, in constant time a token."""

    def __init__(self) -> None:
        self._next_of: dict[tuple[int, ...], int] = {}  # n-gram: the position after its last place
        self._num_indexed = 0

    def find(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens that may follow, none if the end is new; `token_ids` may only grow.

        The longest match counts, then the latest. One that reaches the end repeats itself.
        """
        self._index(token_ids)
        end = len(token_ids)
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            start = self._next_of.get(tuple(token_ids[end - size :])) if size < end else None
            if start is not None:
                found = token_ids[start : start + count]
                while len(found) < count:
                    found += found[: count - len(found)]
                return found
        return []

    def _index(self, token_ids: list[int]) -> None:
        """Take in all n-grams that something follows."""
        for end in range(max(self._num_indexed, _SHORTEST), len(token_ids)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._next_of[tuple(token_ids[end - size : end])] = end
        self._num_indexed = len(token_ids)


@dataclass(slots=True)
class Drafter:
    """Drafts for one sequence, as much as pays.

    Drafts are paid for from a credit: accepted tokens bring it in, and each step a little. So where
    they fail they cost at most that little, and where they hold they become longer.
    """

    max_drafted: int
    """Most drafted tokens a step."""
    begin: int
    end: int
    """Drafts are made while the sequence has `begin` tokens or more, and never past `end`."""
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _length: int = _FIRST_LENGTH
    _credit: float = _FIRST_CREDIT

    def draft(self, token_ids: list[int], num_rows: int, num_sequences: int) -> list[int]:
        """At most `num_rows` tokens, for a step of so many sequences."""
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
