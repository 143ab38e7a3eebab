"""Drafts the next tokens of a sequence (speculative decoding), from its text or by a model's head.

A step with a few more rows costs little more, as long as the step mostly waits for the memory that
holds the weights. So a decode may carry drafted tokens. Prompt lookup (Saxena 2023) finds the last
occurrence of the sequence's last tokens in the prompt or output, and drafts the tokens that
followed there. A model may also have a head that predicts further tokens (multi-token prediction).
If so, the runner makes drafts with this head.

The step samples after each drafted token too. A drafted token is accepted if and only if it equals
the token that the model would sample without the draft. So wrong drafts cost only time, and
`Drafter` and `DraftPolicy` limit this time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

MAX_ROWS = 16
"""The most rows of a step with drafts, including the drafted rows."""

_DRAFT_COST = 1 / 4
_ROW_COST = 1 / 32
"""First guesses at the cost of having drafts, and at the cost of each drafted row, as fractions of
a step. Having drafts costs time because some libraries multiply a single row differently."""

_ALLOWANCE = 0.005
"""The most that failing drafts may cost, as a fraction of all steps."""
_FIRST_CREDIT = 0.5
_MAX_CREDIT = 1.0
"""The most credit, in tokens. More would waste drafts after a text stops repeating itself."""
_LARGEST_DEBT = 4.0
_FIRST_LENGTH = 3

UNKNOWN = -1
"""Stands for a drafted token that the model's head has not chosen yet."""
_MOST_BY_HEAD = 8
"""The most tokens that the head drafts in a step, one after the other."""
_LEAST_GAIN = 1.05
"""The head begins to draft only if the expected speed is above this multiple of the speed without
drafts. The head stops if the multiple falls to 1."""
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
_RECENT, _RECENT_PLAIN = 15, 7
"""Numbers of recent steps whose median time counts, with and without drafts. Steps without drafts
are rare while the head drafts, and an old time would mislead."""
_LEAST_EXTRA = 0.01
"""The least cost of a lookup, as a fraction of a step. Less would be an error of measurement."""
_LEAST_COUNT = 3
"""The least number of steps whose median time counts."""
_PLAIN_EVERY = 32
"""After this many steps with drafts, one step without drafts measures the time without drafts
again."""
_TRIAL = 8
_HOPELESS = 0.75
"""_TRIAL steps with drafts decide whether drafts save time. Fewer steps decide if the speed is
below _HOPELESS times the speed without drafts."""
_FIRST_REST, _LONGEST_REST = 64, 1024
"""Steps without drafts before another trial. Each trial that saves no time doubles the number."""
_FED = 16
"""Before a trial, the head gets the hidden states of this many steps, so that it has seen the last
tokens of the text."""
_FORGETTING = 1 / 256
"""Each step without a lookup moves the estimate for lookups towards its first value, with this
weight. So lookups are tried again, in case the text now repeats itself."""


class Step(Protocol):
    """A step that may have drafts."""

    @property
    def drafts(self) -> list[tuple[int, bool]] | None:
        """For each draft: its length, and whether the model's head makes it. None if the step also
        computes prompts."""


class PromptLookup:
    """Looks up where the last 2 to 4 tokens of a text occurred before, and what followed. The time
    of a call does not depend on the length of the text. A match of a single token is ignored,
    because it means too little."""

    def __init__(self) -> None:
        self._next_of: dict[tuple[int, ...], int] = {}  # n-gram: place after its last occurrence
        self._num_indexed = 0
        self._last = (UNKNOWN,) * 4  # the last indexed tokens

    def find(self, token_ids: list[int], count: int) -> list[int]:
        """Returns `count` tokens that may follow; an empty list if the last tokens did not occur
        before.

        `token_ids` may only grow between calls. The longest match wins. Of equally long matches,
        the latest wins. If fewer than `count` tokens follow the match, these tokens are repeated.
        """
        next_of, place, (a, b, c, d) = self._next_of, self._num_indexed, self._last
        for token in token_ids[place:]:
            next_of[c, d] = next_of[b, c, d] = next_of[a, b, c, d] = place
            a, b, c, d = b, c, d, token
            place += 1
        self._last, self._num_indexed = (a, b, c, d), place
        if (c, d) not in next_of:
            return []
        start = next_of.get((a, b, c, d)) or next_of.get((b, c, d)) or next_of[c, d]
        draft = token_ids[start : start + count]
        while len(draft) < count:
            draft += draft[: count - len(draft)]
        return draft


class DraftPlan(NamedTuple):
    """The plan for the drafts of a step, which is the same for all sequences of the step."""

    length: int = 0
    """Number of tokens from the head."""
    expected: float = 0.0
    """Expected number of accepted tokens of the head; 0 if the head rests. If only `length` is 0,
    the head gets the step's hidden states, and drafts in later steps."""
    lookup_factor: float = 1.0
    """The measured cost of lookups, as a multiple of `_DRAFT_COST` and `_ROW_COST`."""


NO_PLAN = DraftPlan()


class BestDrafts(NamedTuple):
    """The best drafts of the head, and the expected speed as a multiple of the speed without
    drafts."""

    length: int = 0
    expected: float = 0.0
    speed: float = 0.0


class DraftTimes:
    """Measures what drafts cost and save. Each object is for one kind of step: a number of
    sequences that may have drafts, and a number of other sequences."""

    def __init__(self, first_guess: float) -> None:
        self.rates = [_FIRST_RATE] * _MOST_BY_HEAD
        """For each place in a draft of the head: the rate of acceptance if all tokens before it are
        right."""
        self.best: BestDrafts | None = None
        """The best drafts of the head; None after changes."""
        self._num_settled = 0
        self._first_guess = first_guess
        self._plain = RecentMedian(_RECENT_PLAIN)
        """Seconds of steps without drafts. Before each trial, none of them feeds the head."""
        self._by_head: dict[int, RecentMedian] = {}
        """By length of the head's drafts: time of a step, as a multiple of `_plain`."""
        self._lookups = RecentMedian()
        """Cost of lookups, as a multiple of the first guess."""
        self._num_since_plain = 0
        self._num_drafted = 0
        """Steps with drafts since the last rest; more than `_TRIAL` if drafts save time."""
        self._num_rested = 0
        self._rest = _FIRST_REST

    def cost(self, length: int) -> float:
        """Returns the time of a step with the head's drafts of this length, as a multiple of the
        time of a step without drafts. If this length was not tried, the additional time is
        estimated in proportion to `1 + length`."""
        known = [each for each, ratios in self._by_head.items() if ratios.is_known]
        if not known:
            return 1 + self._first_guess * (1 + length)
        tried = min(known, key=lambda each: abs(each - length))
        return 1 + (self._by_head[tried].value - 1) * (1 + length) / (1 + tried)

    @property
    def _feeds_before_trial(self) -> bool:
        return self._num_rested >= self._rest - _FED

    def plan(self, best: BestDrafts) -> DraftPlan:
        factor = self._lookups.value if self._lookups.is_known else 1.0
        if best.speed < _HOPELESS and any(each.is_known for each in self._by_head.values()):
            self._num_drafted = max(self._num_drafted, _TRIAL)
        least = 1 if self._num_drafted > _TRIAL else _LEAST_GAIN
        rests = self._num_drafted >= _TRIAL and best.speed <= least
        self._num_drafted = min(self._num_drafted, _TRIAL) if rests else self._num_drafted
        if not self._plain.is_known or (rests and not self._feeds_before_trial):
            return DraftPlan(lookup_factor=factor)
        needs_plain = self._num_since_plain >= _PLAIN_EVERY
        return DraftPlan(0 if rests or needs_plain else best.length, best.expected, factor)

    def note_lookups(self, seconds: float, modelled_cost: float) -> None:
        if self._plain.is_known:
            extra = max(_LEAST_EXTRA, seconds / self._plain.value - 1)
            self._lookups.add(extra / modelled_cost)

    def settle(self, num_drafted: int, num_accepted: int) -> None:
        """Record that the head drafted `num_drafted` tokens, of which the model accepted
        `num_accepted`."""
        self._num_settled += 1
        weight = max(_WEIGHT, 1 / (_FIRST_COUNT + self._num_settled))
        for place in range(min(num_accepted + 1, num_drafted)):
            self.rates[place] += weight * ((place < num_accepted) - self.rates[place])

    def note_head(self, seconds: float, length: int) -> None:
        self.best = None
        self._num_since_plain += 1
        self._num_drafted += 1
        if self._num_drafted > _TRIAL:
            self._num_rested, self._rest = 0, _FIRST_REST
        if self._plain.is_known and self._num_drafted > 1:  # at first, it computes earlier rows
            self._by_head.setdefault(length, RecentMedian()).add(seconds / self._plain.value)

    def note_plain(self, seconds: float) -> None:
        if not self._feeds_before_trial:  # a step that feeds the head takes longer
            self._plain.add(seconds)
            self._num_since_plain = 0
        if self._num_drafted >= _TRIAL:
            self._num_rested += 1
            if self._num_rested >= self._rest:
                self._num_rested = self._num_drafted = 0
                self._rest = min(2 * self._rest, _LONGEST_REST)
                self._by_head.clear()  # the first steps of a worker are slow, and load changes
                self.best = None


class RecentMedian:
    """The median of recent values, so that a single delayed step has little effect."""

    def __init__(self, most: int = _RECENT) -> None:
        self._recent = deque[float](maxlen=most)
        self._value: float | None = None

    @property
    def is_known(self) -> bool:
        return len(self._recent) >= _LEAST_COUNT

    @property
    def value(self) -> float:
        if self._value is None:
            self._value = median(self._recent)
        return self._value

    def add(self, value: float) -> None:
        self._recent.append(value)
        self._value = None


@dataclass(slots=True)
class DraftPolicy:
    """Decides for all sequences of a step what to draft, by measured times."""

    head_work: float | None = None
    """See `EngineAbilities.head_work`. The first guess at the cost of the head's drafts."""
    recomputes: bool = False
    """Whether the next step computes accepted tokens again (see `KVLayout.states_skip_drafts`)."""
    _times: dict[tuple[int, int], DraftTimes] = field(default_factory=dict)
    _planned: DraftTimes | None = None
    """The measured times that belong to the last plan."""
    _num_without: int = 0
    """Number of steps since the last drafts."""

    def plan(self, num_drafting: int, num_others: int = 0) -> DraftPlan | None:
        """Returns the plan of a step with `num_drafting` sequences that may have drafts, and with
        `num_others` other sequences. Returns None if the step should have no drafts."""
        kind = num_drafting, num_others
        if (times := self._times.get(kind)) is None:
            times = self._times[kind] = DraftTimes(self.head_work or 0.0)
        self._planned = times
        if times.best is None:
            times.best = self._best(times, *kind)
        plan = times.plan(times.best)
        # Lookups cost time even if they find nothing. So they are rarer in larger batches.
        is_skipped = self._num_without % max(1, num_drafting // 2) and plan.expected == 0.0
        return None if is_skipped else plan

    def _best(self, times: DraftTimes, num_drafting: int, num_others: int) -> BestDrafts:
        num_rows = num_drafting + num_others
        share = num_drafting / num_rows
        best = BestDrafts()
        expected, right, rate = 0.0, 1.0, 1.0
        for length in range(1, _MOST_BY_HEAD + 1 if self.head_work is not None else 0):
            num_rows += num_drafting * (1 + self.recomputes)
            if num_rows > MAX_ROWS:
                break
            rate = min(rate, times.rates[length - 1])  # later tokens are harder to predict
            right *= rate
            expected += right
            if (speed := (1 + expected * share) / times.cost(length)) > best.speed:
                best = BestDrafts(length, expected, speed)
        return best

    def note(self, step: Step, seconds: float) -> None:
        """Record the time of the planned step. Skips steps with prompts, and steps in which some
        drafts come from lookups and others from the head."""
        times, self._planned = self._planned, None
        if times is None or (drafts := step.drafts) is None:
            return
        lookups = [length for length, is_by_head in drafts if not is_by_head]
        self._num_without = 0 if drafts else self._num_without + 1
        if not drafts:
            times.note_plain(seconds)
        elif not lookups:
            times.note_head(seconds, max(length for length, _ in drafts))
        elif len(lookups) == len(drafts):
            times.note_lookups(seconds, _DRAFT_COST + _ROW_COST * sum(lookups))

    def settle(self, num_drafted: int, num_accepted: int) -> None:
        """Record a draft of the head in the planned step: `num_drafted` tokens for a sequence, of
        which the model accepted `num_accepted`."""
        if self._planned is not None:
            self._planned.settle(num_drafted, num_accepted)


@dataclass(slots=True)
class Drafter:
    """Drafts as many tokens for one sequence as are likely to save time.

    A step with drafts takes longer and delays all of its sequences. So the sequence has a credit,
    counted in tokens. Each prompt lookup reduces the credit by the cost of the draft. Each accepted
    token adds 1, and each step adds a little. A draft is made only if the credit covers the cost.
    So wrong drafts cost at most the small additions, and right drafts become longer. `DraftPolicy`
    decides about the head's drafts.
    """

    max_drafted: int
    """The most drafted tokens in a step."""
    begin: int
    end: int
    """Drafts are made only while the sequence has at least `begin` tokens, and never past `end`."""
    policy: DraftPolicy = field(default_factory=DraftPolicy)
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _length: int = _FIRST_LENGTH
    _credit: float = _FIRST_CREDIT
    _found: float = _FIRST_FOUND
    _lookup_factor: float = 1.0

    def draft(
        self,
        token_ids: list[int],
        num_rows: int,
        num_sequences: int,
        plan: DraftPlan = NO_PLAN,
    ) -> list[int]:
        """Returns at most `num_rows` drafted tokens, for a step of `num_sequences` sequences. If
        the model's head will draft, all these tokens are UNKNOWN."""
        self._lookup_factor = factor = plan.lookup_factor
        affordable = (self._credit / factor - _DRAFT_COST) / (_ROW_COST * num_sequences)
        if affordable < 1 and plan.length == 0:
            return []
        useful = self.end - len(token_ids) - 1  # the last token is sampled, not drafted
        most = min(self.max_drafted, num_rows, useful)
        if most < 1 or len(token_ids) < self.begin:
            return []
        count = min(most, self._length, int(affordable))
        found = self._lookup.find(token_ids, count) if count > 0 else []
        if plan.expected == 0.0 or (found and self._found > plan.expected):
            return found
        return [UNKNOWN] * min(most, plan.length)

    def rest(self) -> None:
        """Record a decode without a draft."""
        self._credit = min(self._credit + _ALLOWANCE, _MAX_CREDIT)
        self._found += _FORGETTING * (_FIRST_FOUND - self._found)

    def settle_head(self, num_drafted: int, num_accepted: int) -> None:
        """Record a decode with a draft of the head: `num_drafted` tokens, of which `num_accepted`
        were accepted."""
        self.rest()
        self.policy.settle(num_drafted, num_accepted)

    def settle_lookup(
        self, num_drafted: int, num_accepted: int, num_sequences: int, num_drafting: int = 1
    ) -> None:
        """Record a decode with a draft from a lookup: `num_drafted` tokens, of which `num_accepted`
        were accepted. The step had drafts for `num_drafting` of its `num_sequences` sequences."""
        cost = _DRAFT_COST / num_drafting + _ROW_COST * num_drafted
        gain = _ALLOWANCE + num_accepted - cost * num_sequences * self._lookup_factor
        self._credit = max(-_LARGEST_DEBT, min(self._credit + gain, _MAX_CREDIT))
        self._length = 2 * num_accepted + 1
        self._found += _WEIGHT_OF_LOOKUP * (num_accepted - self._found)
