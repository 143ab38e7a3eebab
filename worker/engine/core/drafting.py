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

from promptq.worker.engine.api.messages import HeadWeights, WeightCounts

MAX_ROWS = 16
"""The most rows of a step with drafts, including the drafted rows."""

_DRAFT_COST = 1 / 4
_ROW_COST = 1 / 32
"""The cost of having drafts, and the cost of each drafted row, as fractions of a step. Having
drafts costs time because some libraries multiply a single row differently. Most machines and dtypes
have lower costs."""

_ALLOWANCE = 0.01
"""The most that failing drafts may cost, as a fraction of all steps."""
_FIRST_CREDIT = 0.5
_MAX_CREDIT = 1.0
"""The most credit, in tokens. More would waste drafts after a text stops repeating itself."""
_LARGEST_DEBT = 4.0
_FIRST_LENGTH = 3
_LONGEST = 4
"""Prompt lookup compares the last 2 to 4 tokens. A match of one token means too little."""

UNKNOWN = -1
"""Stands for a drafted token that the model's head has not chosen yet."""
_PRODUCT = 1 / 4
"""The work of multiplying a weight by a row, if the work of reading a weight is 1."""
_STEP, _ROW = 5.5e6, 0.5e6
"""The work of a step, and of each row in it, without the products: scheduling, sampling, etc."""
_DRAFT, _DRAFT_OF_SEQUENCE, _DRAFTED_ROW = 2.5e6, 0.7e6, 0.1e6
"""Further work if the head drafts, without products: per step, per drafting sequence, and per
drafted token."""
_MOST_BY_HEAD = 8
"""The most tokens that the head drafts in a step, one after the other."""
_LEAST_GAIN = 1.05
"""The head drafts only if the expected speed is above this multiple of the speed without drafts."""
_FIRST_RATE = 0.8
"""First estimate of how often a token of the head is accepted if all tokens before it are right."""
_FIRST_FOUND = 3.0
"""First estimate of the accepted tokens of a prompt lookup. Used if the model also has a head."""
_WEIGHT = 1 / 64
_WEIGHT_OF_LOOKUP = 1 / 4
"""Weights of a new draft in two running means: the head's acceptance rates, and the number of
accepted tokens of a lookup. The means begin with the two estimates above."""
_FIRST_COUNT = 16
"""The first estimates of the head's rates weigh as much as this many drafts."""
_RESTS = 32
"""After this many decodes without a draft by the head, its rates rise towards `_FIRST_RATE`, by at
most half of what a failed draft subtracts. So the head is tried again, after 64 decodes or more."""
_FORGETTING = 1 / 256
"""Each step without a lookup moves the estimate for lookups towards its first value, with this
weight. So lookups are tried again, in case the text now repeats itself."""


class PromptLookup:
    """Looks up where the last tokens of a text occurred before, and what followed. Takes constant
    time."""

    def __init__(self) -> None:
        self._next_of: dict[tuple[int, ...], int] = {}  # n-gram: place after its last occurrence
        self._num_indexed = 0

    def find(self, token_ids: list[int], count: int) -> list[int]:
        """Returns `count` tokens that may follow; an empty list if the end of the text is new.

        `token_ids` may only grow between calls. The longest match wins. Of equally long matches,
        the latest wins. If fewer than `count` tokens follow the match, they are repeated.
        """
        end, next_of = len(token_ids), self._next_of
        for place in range(max(self._num_indexed, 2), end):
            last = tuple(token_ids[max(0, place - _LONGEST) : place])
            next_of[last] = next_of[last[-3:]] = next_of[last[-2:]] = place
        self._num_indexed = end
        last = tuple(token_ids[-_LONGEST:])
        start = next_of.get(last) or next_of.get(last[-3:]) or next_of.get(last[-2:])
        if start is None:
            return []
        draft = token_ids[start : start + count]
        while len(draft) < count:
            draft += draft[: count - len(draft)]
        return draft


@dataclass(slots=True)
class Head:
    """Decides for all sequences of a step whether the model's head drafts, and how many tokens."""

    weights: HeadWeights
    recomputes: bool = False
    """Whether the next step computes accepted tokens again (see `KVLayout.states_skip_drafts`)."""
    rates: list[float] = field(default_factory=lambda: [_FIRST_RATE] * _MOST_BY_HEAD)
    """For each place in a draft: the rate of acceptance if all tokens before it are right."""
    _num_settled: int = 0
    _num_rests: int = 0
    _costs: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def best_length(self, num_drafting: int, num_others: int = 0) -> tuple[int, float]:
        """Returns the best number of tokens to draft for each of `num_drafting` sequences, and the
        expected number of accepted tokens per sequence. Both are 0 if drafts would save no time.
        The step also has `num_others` sequences without drafts."""
        kind = num_drafting, num_others
        if kind not in self._costs:
            self._costs[kind] = self._costs_of(num_drafting, num_others)
        best, best_speed = (0, 0.0), _LEAST_GAIN
        share = num_drafting / (num_drafting + num_others)
        expected, right, rate = 0.0, 1.0, 1.0
        for length, cost in enumerate(self._costs[kind], start=1):
            rate = min(rate, self.rates[length - 1])  # later tokens are harder to predict
            right *= rate
            expected += right
            if (speed := (1 + expected * share) / cost) > best_speed:
                best, best_speed = (length, expected), speed
        return best

    def _costs_of(self, num_drafting: int, num_others: int) -> list[float]:
        """Returns the work of steps with 1, 2, ... drafted tokens per sequence, as multiples of the
        work of a step without drafts. The list ends before a step would exceed `MAX_ROWS`."""
        plain, model, costs = num_drafting + num_others, self.weights.model, list[float]()
        without = _STEP + _ROW * plain + _products(model, plain)
        of_token = _DRAFTED_ROW * num_drafting + _products(self.weights.head, num_drafting)
        for length in range(1, _MOST_BY_HEAD + 1):
            num_rows = plain + num_drafting * length * (1 + self.recomputes)
            if num_rows > MAX_ROWS:
                break
            work = _STEP + _ROW * num_rows + _products(model, num_rows)
            work += _DRAFT + _DRAFT_OF_SEQUENCE * num_drafting + length * of_token
            costs.append(work / without)
        return costs

    def settle(self, num_drafted: int, num_accepted: int) -> None:
        self._num_settled += 1
        weight = max(_WEIGHT, 1 / (_FIRST_COUNT + self._num_settled))
        for place in range(min(num_accepted + 1, num_drafted)):
            self.rates[place] += weight * ((place < num_accepted) - self.rates[place])

    def rest(self) -> None:
        """Record a decode for which the head has drafted nothing."""
        self._num_rests = (self._num_rests + 1) % _RESTS
        if self._num_rests == 0:
            self.rates = [
                rate + _WEIGHT * max(0.0, min(rate / 2, _FIRST_RATE - rate)) for rate in self.rates
            ]


def _products(weights: WeightCounts, num_rows: int) -> float:
    """Returns the work of reading weights and multiplying them by rows. The more rows a step has,
    the more experts it reads."""
    read = weights.dense + weights.experts * (1.0 - float((1.0 - weights.used) ** num_rows))
    return read + _PRODUCT * num_rows * (weights.dense + weights.experts * weights.used)


@dataclass(slots=True)
class Drafter:
    """Drafts as many tokens for one sequence as are likely to save time.

    A step with drafts takes longer and delays all of its sequences. So each prompt lookup is paid
    from a credit, in tokens. Each accepted token adds to the credit, and each step adds a little.
    So failing drafts cost at most the small addition, and right drafts become longer. `Head`
    decides about the head's drafts.
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

    def draft(
        self,
        token_ids: list[int],
        num_rows: int,
        num_sequences: int,
        by_head: tuple[int, float] = (0, 0.0),
    ) -> list[int]:
        """Returns at most `num_rows` drafted tokens, for a step of `num_sequences` sequences. All
        are UNKNOWN if the model's head will draft. `by_head` comes from `Head.best_length`."""
        affordable = int((self._credit - _DRAFT_COST) / (_ROW_COST * num_sequences))
        useful = self.end - len(token_ids) - 1  # the last token is sampled, not drafted
        most = min(self.max_drafted, num_rows, useful)
        if most < 1 or len(token_ids) < self.begin:
            return []
        count = min(most, self._length, affordable)
        found = self._lookup.find(token_ids, count) if count > 0 else []
        length, expected = by_head
        if length == 0 or (found and self._found > expected):
            return found
        return [UNKNOWN] * min(most, length)

    def settle(
        self,
        num_drafted: int,
        num_accepted: int,
        num_sequences: int,
        num_drafting: int = 1,
        *,
        by_head: bool = False,
    ) -> None:
        """Record a decode of the sequence, with or without a draft, in a step that had drafts for
        `num_drafting` of its `num_sequences` sequences."""
        credit = self._credit + _ALLOWANCE
        if num_drafted and not by_head:
            cost = _DRAFT_COST / num_drafting + _ROW_COST * num_drafted
            credit += num_accepted - cost * num_sequences
            self._length = 2 * num_accepted + 1
            self._found += _WEIGHT_OF_LOOKUP * (num_accepted - self._found)
        else:
            self._found += _FORGETTING * (_FIRST_FOUND - self._found)
        self._credit = max(-_LARGEST_DEBT, min(credit, _MAX_CREDIT))
        if self.head is not None:
            if num_drafted and by_head:
                self.head.settle(num_drafted, num_accepted)
            else:
                self.head.rest()
