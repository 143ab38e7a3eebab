"""Drafting: what is guessed, when it pays, and that it never changes a token."""

from __future__ import annotations

import random

import pytest

from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.drafting import (
    MAX_ROWS,
    UNKNOWN,
    Drafter,
    DraftPolicy,
    PromptLookup,
)
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from tests.support.model_free import (
    ModelFreeRunner,
    ModelFreeStep,
    build_model_free_engine,
    tokens_of,
)
from tests.worker.engine.core.stepping import (
    add,
    make_request,
    make_scheduler,
    make_sequence,
    run_to_end,
    step,
)

NO_END = 10**6


def found_by_search(token_ids: list[int], count: int) -> list[int]:
    """Finds the draft that a lookup must find, in the slow way."""
    for size in (4, 3, 2):
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == token_ids[-size:]:
                text = list(token_ids)
                for place in range(start + size, start + size + count):
                    text.append(text[place])
                return text[len(token_ids) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_a_lookup_finds_the_latest_of_the_longest_matches_however_the_text_grew(seed: int) -> None:
    chance = random.Random(seed)
    lookup, text = PromptLookup(), []
    num_found = 0
    for _ in range(100):
        text += [chance.randrange(4) for _ in range(chance.choice([0, 1, 1, 2, 9]))]
        count = chance.randint(1, 9)
        expected = found_by_search(text, count)
        assert lookup.find(text, count) == expected
        num_found += bool(expected)
    assert num_found > 50


def test_a_match_that_reaches_the_end_repeats_itself() -> None:
    assert PromptLookup().find([5, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert PromptLookup().find([8, 8, 8], 4) == [8, 8, 8, 8]


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3, 4, 5], [7, 1, 7]])
def test_what_is_new_is_not_guessed_at(text: list[int]) -> None:
    assert PromptLookup().find(text, 5) == []


def settle(drafter: Drafter, draft: list[int], num_accepted: int, *counts: int) -> None:
    if not draft:
        drafter.rest()
    elif UNKNOWN in draft:
        drafter.settle_head(len(draft), num_accepted)
    else:
        drafter.settle_lookup(len(draft), num_accepted, *(counts or (1,)))


def test_drafts_become_longer_while_they_hold_and_short_when_they_fail() -> None:
    text = [1, 2, 3] * 10
    drafter = Drafter(7, begin=0, end=NO_END)
    lengths = []
    for _ in range(3):
        draft = drafter.draft(text, 15, 1)
        lengths.append(len(draft))
        drafter.settle_lookup(len(draft), len(draft), 1)
        text += [*draft, *PromptLookup().find([*text, *draft], 1)]
    assert lengths == [3, 7, 7]
    drafter.settle_lookup(7, 0, 1)
    assert len(drafter.draft(text, 15, 1)) == 1


def test_drafts_that_always_fail_are_rare() -> None:
    text = [1, 2, 3] * 10
    drafter = Drafter(7, begin=0, end=NO_END)
    drafted = []
    for _ in range(1000):
        draft = drafter.draft(text, 15, 1)
        drafted.append(len(draft))
        settle(drafter, draft, 0)
    assert 10 < sum(map(bool, drafted)) < 50
    assert sum(drafted) < 60


def test_a_draft_stays_within_its_bounds() -> None:
    text = [1, 2, 3] * 10
    drafter = Drafter(7, begin=30, end=33)
    drafter.settle_lookup(0, 9, 1)
    assert len(drafter.draft(text, 15, 1)) == 2, "one token is left to sample"
    assert drafter.draft(text[:29], 15, 1) == []
    assert len(drafter.draft(text, 1, 1)) == 1
    assert drafter.draft(text, 0, 1) == []
    assert drafter.draft(text, 15, 500) == [], "in a large batch it is not worth its rows"
    assert drafter.draft([*text, 1, 2], 15, 1) == [], "the last token is sampled"


class Clock:
    """Steps of sequences that a head drafts for. Time is counted, in steps without drafts."""

    def __init__(self, cost: float, policy: DraftPolicy | None = None) -> None:
        """A draft of n tokens takes `cost` * (1 + n), and feeding the head takes `feed`."""
        self.cost, self.feed = cost, 0.0
        self.policy = policy or DraftPolicy(0.05)
        self.drafter = Drafter(7, begin=0, end=NO_END, policy=self.policy)
        self.seconds, self.num_tokens = 0.0, 0

    def step(
        self,
        text: list[int],
        num_right: int,
        num_sequences: int = 1,
        lookup_right: int | None = None,
    ) -> list[int]:
        """Returns the draft of each sequence. Its first `num_right` tokens are right; if it comes
        from a lookup, `lookup_right`."""
        plan = self.policy.plan(num_sequences)
        draft = [] if plan is None else self.drafter.draft(text, 15, num_sequences, plan)
        by_head = UNKNOWN in draft
        if lookup_right is not None and not by_head:
            num_right = lookup_right
        num_accepted = min(len(draft), num_right)
        assert not by_head or {*draft} == {UNKNOWN}
        share = ScheduledSequence(make_sequence(0), 9, 1, samples=True)
        share.draft, share.drafts_by_head = tuple(draft), by_head
        settle(self.drafter, draft, num_accepted, num_sequences)
        seconds = 1 + self.cost * (1 + len(draft)) * bool(draft)
        seconds += self.feed * (plan is not None and plan.expected > 0)
        self.policy.note(Batch([share] * num_sequences), seconds)
        self.seconds += seconds
        self.num_tokens += 1 + num_accepted
        return draft

    def lengths(self, num_steps: int, num_right: int, num_sequences: int = 1) -> list[int]:
        """Steps with a text in which nothing can be looked up."""
        new = [*range(100)]
        return [len(self.step(new, num_right, num_sequences)) for _ in range(num_steps)]


def test_a_head_drafts_as_many_tokens_as_are_right() -> None:
    for num_right in (1, 2, 4, 7):
        lengths = Clock(cost=0.02).lengths(500, num_right)
        assert {*lengths[400:]} == {0, num_right}
        assert lengths[400:].count(0) <= 4, "they measure a step without drafts"


def test_a_head_that_is_wrong_drafts_seldom() -> None:
    lengths = Clock(cost=0.02).lengths(4000, 0)
    assert max(lengths[300:]) == 1
    assert 8 <= sum(lengths[1000:]) < 40


@pytest.mark.parametrize("cost", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_drafts_cost_nothing_where_they_do_not_help(cost: float, num_sequences: int) -> None:
    """Whatever the first guess is. Of 2 tokens that are right, a draft saves at most 2 steps."""
    for guess in (0.01, 1.0):
        clock = Clock(cost, DraftPolicy(guess))
        clock.lengths(3000, 2, num_sequences)
        assert clock.num_tokens / clock.seconds > 0.95 * max(1.0, 3 / (1 + 3 * cost))


def test_drafts_must_save_more_time_than_feeding_the_head_costs() -> None:
    """Twice as many tokens a step do not help if each step that feeds the head takes 2.2 times."""
    clock = Clock(cost=0.1)
    clock.feed = 1.0
    lengths = clock.lengths(4000, 1)
    assert 8 <= sum(map(bool, lengths[:2000])) < 100
    assert clock.num_tokens / clock.seconds > 0.95


def test_each_number_of_sequences_has_its_times() -> None:
    clock = Clock(cost=0.1)
    clock.lengths(400, 2)
    clock.cost = 2.0
    assert sum(map(bool, clock.lengths(200, 2, 4))) < 20
    clock.cost = 0.1
    assert clock.lengths(200, 2).count(2) > 180


def test_a_step_that_is_delayed_changes_no_length() -> None:
    clock = Clock(cost=0.1)
    for _ in range(5):
        clock.lengths(100, 2)
        clock.cost = 50.0
        clock.lengths(1, 2)
        clock.cost = 0.1
    assert clock.lengths(64, 2).count(2) > 60


def test_a_draft_that_recurrent_layers_compute_again_is_shorter() -> None:
    lengths = [
        max(Clock(0.01, DraftPolicy(0.01, recomputes=recomputes)).lengths(200, 7, 2))
        for recomputes in (False, True)
    ]
    assert lengths == [7, 3], "of 16 rows"


def test_a_request_begins_with_what_is_known_of_the_head() -> None:
    clock = Clock(cost=0.1)
    clock.lengths(200, 0)
    assert sum(Clock(0.1, clock.policy).lengths(20, 0)) <= 1


def test_the_drafter_whose_tokens_are_accepted_drafts() -> None:
    repeats = [1, 2, 3] * 10
    clock = Clock(0.1, DraftPolicy(0.1))
    for _ in range(100):
        draft = clock.step(repeats, 7)
    assert draft == [1, 2, 3, 1, 2, 3, 1], "a lookup costs less"
    clock = Clock(cost=0.1)
    drafts = [clock.step(repeats, 3, lookup_right=0) for _ in range(200)]
    assert sum(UNKNOWN in draft for draft in drafts[100:]) > 90, "lookups were wrong"


def test_lookups_are_as_rare_as_they_are_dear() -> None:
    """The policy measures their cost."""
    text = [1, 2, 3] * 10
    num_drafts = []
    for cost in (0.05, 0.5):
        clock = Clock(cost, DraftPolicy())
        num_drafts.append(sum(bool(clock.step(text, 0)) for _ in range(2000)))
        assert clock.seconds < 2030
    assert num_drafts[0] > 3 * num_drafts[1] > 0


def test_lookups_that_find_nothing_are_rarer_in_a_larger_batch() -> None:
    """One that finds something is followed by another."""
    without = Batch([ScheduledSequence(make_sequence(0), 9, 1, samples=True)])
    with_draft = Batch([ScheduledSequence(make_sequence(0), 9, 1, samples=True, draft=(1,))])
    for num_sequences, every in ((1, 1), (4, 2), (8, 4), (15, 7)):
        policy, steps = DraftPolicy(), []
        for number in range(28):
            if policy.plan(num_sequences) is not None:
                steps.append(number)
            policy.note(without, 1.0)
        assert steps == [*range(0, 28, every)]
        assert policy.plan(num_sequences) is not None
        policy.note(with_draft, 1.0)
        assert policy.plan(num_sequences) is not None


def test_one_failed_lookup_is_paid_by_all_sequences_that_waited() -> None:
    """Of 8 sequences, one drafts. If all draft in the same step, they share the cost."""
    text = [1, 2, 3] * 10
    num_drafts = []
    for num_drafting in (1, 8):
        drafter, count = Drafter(7, begin=0, end=NO_END), 0
        for _ in range(1000):
            draft = drafter.draft(text, 15, 8)
            count += bool(draft)
            settle(drafter, draft, 0, 8, num_drafting)
        num_drafts.append(count)
    assert 2 < num_drafts[0] < 8
    assert num_drafts[1] > 2 * num_drafts[0]


def drafting(sequence: Sequence) -> Sequence:
    sequence.drafter = Drafter(7, begin=0, end=NO_END)
    return sequence


def draft_lengths(batch: Batch) -> list[int]:
    return [len(share.draft) for share in batch.scheduled]


def test_drafts_take_only_rows_that_a_step_has_to_spare() -> None:
    scheduler = make_scheduler(max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_ROWS)
    first = drafting(make_sequence(0, tokens=[7] * 6))
    add(scheduler, first)
    assert draft_lengths(scheduler.schedule()) == [0], "a prompt is not drafted for"
    step(scheduler)
    assert draft_lengths(scheduler.schedule()) == [3]
    add(scheduler, make_sequence(MAX_ROWS - 3))
    assert draft_lengths(scheduler.schedule()) == [2, 0]
    add(scheduler, make_sequence(2))
    assert draft_lengths(scheduler.schedule()) == [0, 0, 0]


def test_drafts_take_only_blocks_that_nobody_needs() -> None:
    for num_blocks, expected in ((2, 0), (3, 0), (4, 3)):
        scheduler = make_scheduler(num_blocks=num_blocks)
        add(scheduler, drafting(make_sequence(0, tokens=[7] * 7)))
        step(scheduler)
        assert draft_lengths(scheduler.schedule()) == [expected]
        assert scheduler.num_preemptions == 0


def repeating_request(sequence_id: int, num_tokens: int = 40, **fields: object) -> EngineRequest:
    """Its output stands in its prompt."""
    prompt = [0, *tokens_of(sequence_id, num_tokens), 1]
    return make_request(sequence_id, prompt, max_tokens=num_tokens, **fields)


@pytest.mark.usefixtures("guessed_lookups")
def test_text_that_stands_in_its_prompt_comes_several_tokens_a_step() -> None:
    engine = build_model_free_engine(speculative_tokens=7)
    engine.add(repeating_request(1, params=SamplingParams(logprobs=0)))
    logprobs: list[TokenLogprob] = []
    tokens = []
    while engine.has_work:
        [output] = engine.step().outputs
        assert output.logprobs is not None
        tokens += output.token_ids
        logprobs += output.logprobs
        engine.check_integrity()
    assert tokens == [each.token_id for each in logprobs] == tokens_of(1, 40)
    stats = engine.stats
    assert stats.num_steps < 15
    assert stats.accepted_tokens == 40 - stats.num_steps
    assert stats.drafted_tokens >= stats.accepted_tokens
    assert (stats.generation_tokens, stats.recomputed_tokens, stats.prompt_tokens) == (40, 0, 42)


@pytest.mark.usefixtures("guessed_lookups")
def test_an_end_in_the_midst_of_a_draft_is_the_end() -> None:
    expected = tokens_of(1, 40)
    end = expected[21]
    at = expected.index(end)
    for fields in (
        {"end_token_ids": frozenset({end})},
        {"end_token_ids": frozenset(expected[:30]), "params": SamplingParams(min_tokens=at + 1)},
    ):
        engine = build_model_free_engine(speculative_tokens=7)
        engine.add(repeating_request(1, **fields))
        [(tokens, last)] = run_to_end(engine).values()
        assert (tokens, last.finish_reason) == (expected[: at + 1], FinishReason.STOP)
        assert engine.stats.num_used_blocks == 0


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_max_tokens_and_the_model_length_are_met_exactly(max_tokens: int) -> None:
    for max_model_len in (None, 42 + max_tokens):
        engine = build_model_free_engine(speculative_tokens=7, max_model_len=max_model_len)
        request = repeating_request(1)
        if max_model_len is None:
            request = make_request(1, request.prompt_token_ids, max_tokens=max_tokens)
        engine.add(request)
        [(tokens, last)] = run_to_end(engine).values()
        assert (tokens, last.finish_reason) == (tokens_of(1, max_tokens), FinishReason.LENGTH)


@pytest.mark.usefixtures("guessed_lookups")
def test_a_request_says_for_itself_whether_it_is_drafted_for() -> None:
    for own, of_worker, drafts in ((None, 7, True), (0, 7, False), (3, 0, True), (None, 0, False)):
        engine = build_model_free_engine(speculative_tokens=of_worker)
        engine.add(repeating_request(1, params=SamplingParams(speculative_tokens=own)))
        assert run_to_end(engine)[1][0] == tokens_of(1, 40)
        assert (engine.stats.drafted_tokens > 0) == drafts


@pytest.mark.parametrize(
    "fields",
    [
        {"params": SamplingParams(repetition_penalty=1.1)},
        {"params": SamplingParams(presence_penalty=0.1)},
        {"params": SamplingParams(frequency_penalty=0.1)},
        {"bad_token_sequences": ((1, 2),)},
    ],
)
def test_nothing_is_drafted_where_a_choice_depends_on_what_was_chosen(
    fields: dict[str, object],
) -> None:
    engine = build_model_free_engine(speculative_tokens=7)
    engine.add(repeating_request(1, **fields))
    assert run_to_end(engine)[1][0] == tokens_of(1, 40)
    assert engine.stats.drafted_tokens == 0


class FailingBehindDrafts(ModelFreeRunner):
    """Cannot sample at one output index."""

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        sampled = super().collect(launched)
        for share, tokens in zip(launched.batch.sampling, sampled, strict=True):
            for ahead in range(len(tokens)):
                if share.sequence.num_output_tokens + ahead == 17:
                    tokens[ahead] = SampledToken(-1, error="logits are not finite")
        return sampled


@pytest.mark.usefixtures("guessed_lookups")
def test_an_error_behind_accepted_tokens_loses_none_of_them() -> None:
    engine = LLMEngine(
        FailingBehindDrafts(), max_num_seqs=2, max_num_batched_tokens=64, speculative_tokens=7
    )
    engine.add(repeating_request(1))
    [(tokens, last)] = run_to_end(engine).values()
    assert engine.stats.accepted_tokens > 0
    assert (tokens, last.finish_reason) == (tokens_of(1, 17), FinishReason.ERROR)
    assert last.error == "logits are not finite"


@pytest.mark.usefixtures("guessed_lookups")
def test_rejected_tokens_are_shared_with_nobody() -> None:
    """Another request that goes on as the draft did computes its own blocks."""
    engine = build_model_free_engine(speculative_tokens=7, block_size=2)
    wrong = [*tokens_of(1, 2), 3, 3, 3, 3, 3, 3, 3, 3]
    prompt = [0, *wrong, 1]
    engine.add(make_request(1, prompt, max_tokens=12))
    assert run_to_end(engine)[1][0] == tokens_of(1, 12)
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens
    engine.add(make_request(2, [*prompt, *wrong], max_tokens=5))
    [(tokens, last)] = run_to_end(engine).values()
    assert tokens == tokens_of(2, 5)
    assert last.timing is not None
    assert last.timing.cached_tokens == len(prompt) + 2
