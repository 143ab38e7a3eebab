"""Drafts the next tokens of a sequence (speculative decoding), from its text or by a model's head.

A step with a few more rows costs little more, as long as it mostly waits for the weights. So a
decode may carry drafted tokens. Prompt lookup (Saxena 2023) finds the last occurrence of the
sequence's last tokens in the prompt or output, and drafts the tokens that followed there. A model
may also have a head that predicts further tokens (multi-token prediction). Then the runner drafts.

The step samples after each drafted token too. A drafted token is accepted if and only if it equals
the token that the model would sample without it. So wrong drafts cost only time, which is limited.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_ROWS = 16
"""The most rows of a step with drafts, including the drafted rows."""

_DRAFT_COST = 1 / 4
_ROW_COST = 1 / 32
"""The cost of a drafted row, as a fraction of a step. The first drafted row costs more, because
some libraries multiply a single row differently. Most machines and dtypes have lower costs."""

_ALLOWANCE = 0.01
"""The cost that failing drafts may have, as a fraction of all steps."""
_FIRST_CREDIT = 0.5
_MAX_CREDIT = 1.0
"""The most credit, in tokens. More would waste drafts after a text stops repeating itself."""
_LARGEST_DEBT = 1.0
_FIRST_LENGTH = 3
_LONGEST, _SHORTEST = 4, 2
"""The most and the least tokens that have to match. A match of a single token means too little."""

UNKNOWN = -1
"""Stands for a drafted token that the model's head has not chosen yet."""
_MOST_BY_HEAD = 8
"""The most tokens that the head drafts in a step, one after the other."""
_FIRST_RATE = 0.7
"""The expected rate at which a token of the head is accepted if all tokens before it are right."""
_FIRST_FOUND = 3.0
"""The expected number of accepted tokens of a prompt lookup, if the model also has a head."""
_WEIGHT = 1 / 16
_WEIGHT_OF_LOOKUP = 1 / 4
"""The weights of a new draft in two running means, which begin with the two expectations above: the
acceptance rates of the head, and the number of accepted tokens of a lookup."""
_FORGETTING = 1 / 256
"""Weight by which each step without a lookup moves the expectation of lookups back to its first
value. So a text that begins to repeat itself is noticed."""


class PromptLookup:
    """Finds tokens that followed earlier occurrences of a text's last tokens, in constant time."""

    def __init__(self) -> None:
        self._next_of: dict[tuple[int, ...], int] = {}  # n-gram: place after its last occurrence
        self._num_indexed = 0

    def find(self, token_ids: list[int], count: int) -> list[int]:
        """Returns `count` tokens that may follow; an empty list if the end of the text is new.

        `token_ids` may only grow between calls. The longest match wins, and the latest of equally
        long ones. If fewer than `count` tokens follow the match, they are repeated.
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
class Head:
    """The costs and acceptance rates of the model's drafting head, over all sequences."""

    cost: float
    """See `EngineAbilities.head_cost`."""
    rates: list[float] = field(default_factory=lambda: [_FIRST_RATE] * _MOST_BY_HEAD)
    """For each place in a draft: the rate of acceptance if all tokens before it are right."""

    def settle(self, num_drafted: int, num_accepted: int) -> None:
        for place in range(min(num_accepted + 1, num_drafted)):
            self.rates[place] += _WEIGHT * ((place < num_accepted) - self.rates[place])

    def best_length(self, most: int, num_sequences: int, credit: float) -> tuple[int, float]:
        """Returns the best number of tokens for the head to draft, and the speed with this draft.
        The speed is the expected number of tokens in the time of a step without a draft.

        If no draft pays off, but the credit covers a draft of one token, the head drafts one token.
        This keeps the rates of acceptance up to date.

        The cost grows with the number of sequences: when 4 sequences of the shipped model ran, one
        token that the head drafted for each of them took 0.7 of a step.
        """
        of_token = (_ROW_COST + self.cost) * num_sequences
        expected, right, cost = 0.0, 1.0, _DRAFT_COST
        best = (0, 1.0)
        for length, rate in enumerate(self.rates[:most], start=1):
            right *= rate
            expected += right
            cost += of_token
            if (tokens := (1 + expected) / (1 + cost)) > best[1]:
                best = (length, tokens)
        if best[0] == 0 and _DRAFT_COST + of_token <= credit:
            return 1, 1.0
        return best


@dataclass(slots=True)
class Drafter:
    """Drafts tokens for one sequence, as many as pay off.

    Drafts are paid from a credit. Each accepted token adds to the credit, and each step adds a
    little. So failing drafts cost at most the small addition, and right drafts become longer.
    """

    max_drafted: int
    """The most drafted tokens in a step."""
    begin: int
    end: int
    """Drafts are made only while the sequence has at least `begin` tokens, and never past `end`."""
    head: Head | None = None
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _length: int = _FIRST_LENGTH
    _credit: float = _FIRST_CREDIT
    _found: float = _FIRST_FOUND

    def draft(self, token_ids: list[int], num_rows: int, num_sequences: int) -> list[int]:
        """Returns at most `num_rows` drafted tokens, for a step of `num_sequences` sequences. All
        of them are UNKNOWN if the model's head will draft."""
        affordable = int((self._credit - _DRAFT_COST) / (_ROW_COST * num_sequences))
        useful = self.end - len(token_ids) - 1  # the last token is sampled, not drafted
        most = min(self.max_drafted, num_rows, useful)
        if most < 1 or len(token_ids) < self.begin:
            return []
        count = min(most, self._length, affordable)
        found = self._lookup.find(token_ids, count) if count > 0 else []
        if self.head is None:
            return found
        length, tokens_per_step = self.head.best_length(most, num_sequences, self._credit)
        if found and length == 0:
            return found
        if found:
            cost = _DRAFT_COST + _ROW_COST * len(found) * num_sequences
            if (1 + self._found) / (1 + cost) > tokens_per_step:
                return found
        return [UNKNOWN] * length

    def settle(
        self, num_drafted: int, num_accepted: int, num_sequences: int, *, by_head: bool = False
    ) -> None:
        """Update the credit after a decode of the sequence, with or without a draft."""
        credit = self._credit + _ALLOWANCE + num_accepted
        if by_head or not num_drafted:
            self._found += _FORGETTING * (_FIRST_FOUND - self._found)
        if num_drafted:
            credit -= _DRAFT_COST + _ROW_COST * num_drafted * num_sequences
            if by_head and self.head is not None:
                credit -= self.head.cost * num_drafted * num_sequences
                self.head.settle(num_drafted, num_accepted)
            else:
                self._length = 2 * num_accepted + 1
                self._found += _WEIGHT_OF_LOOKUP * (num_accepted - self._found)
        self._credit = max(-_LARGEST_DEBT, min(credit, _MAX_CREDIT))
