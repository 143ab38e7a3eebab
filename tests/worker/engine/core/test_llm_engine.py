"""The engine as a worker drives it: every request ends once, with its own tokens, and nothing
stays behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptq.shared.errors import ConfigurationError
from promptq.shared.protocol.request import FinishReason, SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.runner import SampledToken
from promptq.worker.engine.core.sequence import Batch
from tests.support.model_free import (
    ModelFreeRunner,
    ModelFreeStep,
    build_model_free_engine,
    token_at,
    tokens_of,
)
from tests.worker.engine.core.stepping import make_request, run_to_end


def expected_tokens(request: EngineRequest, max_model_len: int) -> list[int]:
    """All that is still to come of a request."""
    num_tokens = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    coming = []
    for position in range(len(request.output_token_ids), num_tokens):
        coming.append(token_at(request.seed, position))
        if position + 1 >= request.params.min_tokens and coming[-1] in request.end_token_ids:
            break
    return coming


class BrokenRunner(ModelFreeRunner):
    """Does to chosen steps or sequences what a real device may do."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, block_size=4)
        self.fail_launch = self.fail_collect = False
        self.failing_sequence: int | None = None
        self.drop_a_token = self.lose_a_block = False

    def launch(self, batch: Batch, after: ModelFreeStep | None = None) -> ModelFreeStep:
        launched = super().launch(batch, after)
        if self.fail_launch:
            raise OSError("the device is gone")
        return launched

    def collect(self, launched: ModelFreeStep) -> list[list[SampledToken]]:
        if self.fail_collect:
            raise OSError("the device is gone")
        sampled = super().collect(launched)
        for index, share in enumerate(launched.batch.sampling):
            if self.lose_a_block:
                share.sequence.block_table.pop()
            if share.sequence.sequence_id == self.failing_sequence:
                sampled[index][-1] = SampledToken(-1, error="logits are not finite")
        return sampled[1:] if self.drop_a_token else sampled


def make_broken_engine(**options: Any) -> tuple[LLMEngine, BrokenRunner]:
    runner = BrokenRunner()
    return LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=32, **options), runner


def test_requests_that_join_and_leave_all_get_their_own_tokens() -> None:
    engine = build_model_free_engine(max_num_seqs=3, max_num_batched_tokens=16, prefill_chunk=8)
    for sequence_id in range(1, 11):
        engine.add(make_request(sequence_id, 3 * sequence_id, max_tokens=sequence_id))
    ended = run_to_end(engine)
    assert {key: tokens for key, (tokens, _) in ended.items()} == {
        key: tokens_of(key, key) for key in range(1, 11)
    }
    assert {output.finish_reason for _, output in ended.values()} == {FinishReason.LENGTH}
    stats = engine.stats
    assert (stats.num_processed, stats.generation_tokens) == (10, 55)
    assert stats.prompt_tokens + stats.cached_tokens == 3 * 55
    assert (stats.recomputed_tokens, stats.num_preemptions, stats.num_used_blocks) == (0, 0, 0)


def test_a_step_reports_what_it_took_and_who_is_there() -> None:
    engine = build_model_free_engine(max_num_seqs=1, step_seconds=0.002)
    engine.add(make_request(1, 20))
    engine.add(make_request(2, 20))
    stats = engine.step().stats
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert (stats.num_blocks, stats.num_used_blocks) == (256, 2)
    assert stats.step_seconds >= 0.002
    assert stats.busy_seconds == stats.step_seconds
    assert engine.step().stats.busy_seconds > stats.busy_seconds


def test_a_step_without_work_computes_nothing() -> None:
    engine = build_model_free_engine()
    assert not engine.has_work
    output = engine.step()
    assert output.outputs == []
    assert output.stats.num_steps == 0


def test_slot_and_blocks_are_free_when_the_last_output_is_returned() -> None:
    engine = build_model_free_engine()
    engine.add(make_request(1, max_tokens=1))
    output = engine.step()
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert (output.stats.num_used_blocks, output.stats.num_running) == (0, 0)
    assert not engine.has_work


def test_the_first_and_the_last_output_have_the_figures_of_the_sequence() -> None:
    engine = build_model_free_engine(step_seconds=0.001)
    engine.add(make_request(1, 40, max_tokens=3))
    outputs = [engine.step().outputs[0] for _ in range(3)]
    assert [output.timing is None for output in outputs] == [False, True, False]
    timing = outputs[-1].timing
    assert timing is not None
    assert timing.scheduled_at is not None
    assert timing.first_token_at is not None
    assert timing.scheduled_at < timing.first_token_at
    assert (timing.cached_tokens, timing.recomputed_tokens, timing.preemptions) == (0, 0, 0)
    engine.add(make_request(2, make_request(1, 40).prompt_token_ids, max_tokens=1))
    [again] = engine.step().outputs
    assert again.timing is not None
    assert again.timing.cached_tokens == 32
    assert (engine.stats.cached_tokens, engine.stats.prompt_tokens) == (32, 48)


def test_an_end_token_stops_and_is_part_of_the_output() -> None:
    expected = tokens_of(1, 10)
    end = expected[4]
    at = expected.index(end)
    engine = build_model_free_engine()
    engine.add(make_request(1, end_token_ids=frozenset({end})))
    [(tokens, last)] = run_to_end(engine).values()
    assert tokens == expected[: at + 1]
    assert last.finish_reason is FinishReason.STOP


def test_an_end_token_counts_only_from_min_tokens_on() -> None:
    letters = frozenset(range(256))
    engine = build_model_free_engine()
    params = SamplingParams(min_tokens=4)
    engine.add(make_request(1, end_token_ids=letters, params=params))
    emitted = [1, 2, 3]
    engine.add(make_request(2, end_token_ids=letters, params=params, output_token_ids=emitted))
    ended = run_to_end(engine)
    assert ended[1][0] == tokens_of(1, 4)
    assert ended[2][0] == [token_at(2, 3)], "tokens of earlier attempts count"
    assert {last.finish_reason for _, last in ended.values()} == {FinishReason.STOP}


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    engine = build_model_free_engine()
    expected = tokens_of(1, 3)
    assert expected[2] not in expected[:2]
    engine.add(make_request(1, max_tokens=3, end_token_ids=frozenset({expected[2]})))
    [(tokens, last)] = run_to_end(engine).values()
    assert (tokens, last.finish_reason) == (expected, FinishReason.STOP)


def test_the_model_length_ends_a_sequence() -> None:
    engine = build_model_free_engine(max_model_len=12)
    engine.add(make_request(1, 5, max_tokens=100))
    [(tokens, last)] = run_to_end(engine).values()
    assert (len(tokens), last.finish_reason) == (7, FinishReason.LENGTH)


def test_a_sequence_may_fill_the_whole_cache() -> None:
    engine = build_model_free_engine(num_blocks=3, block_size=4, max_num_seqs=2)
    assert engine.limits.max_model_len == engine.limits.kv_tokens == 12
    engine.add(make_request(1, 11, max_tokens=100))
    engine.add(make_request(2, 1, max_tokens=100))
    ended = run_to_end(engine)
    assert [len(tokens) for tokens, _ in ended.values()] == [1, 11]


def test_a_resumed_request_goes_on_where_it_was() -> None:
    engine = build_model_free_engine()
    emitted = tokens_of(1, 6)
    engine.add(make_request(1, max_tokens=10, output_token_ids=emitted))
    [(tokens, last)] = run_to_end(engine).values()
    assert tokens == tokens_of(1, 10)[6:]
    assert last.finish_reason is FinishReason.LENGTH
    assert engine.stats.recomputed_tokens == 0


def test_cached_tokens_are_prompt_tokens_also_where_output_was_cached_too() -> None:
    engine = build_model_free_engine(block_size=4)
    engine.add(make_request(1, 8, max_tokens=20))
    run_to_end(engine)
    engine.add(make_request(1, 8, max_tokens=20, output_token_ids=tokens_of(1, 15)))
    [(tokens, last)] = run_to_end(engine).values()
    assert tokens == tokens_of(1, 20)[15:]
    assert last.timing is not None
    assert last.timing.cached_tokens == engine.stats.cached_tokens == 8


def test_an_error_ends_its_sequence_alone() -> None:
    engine, runner = make_broken_engine()
    for sequence_id in (1, 2, 3):
        engine.add(make_request(sequence_id, 9))
    engine.step()
    runner.failing_sequence = 2
    ended = run_to_end(engine)
    assert ended[2][0] == []
    assert ended[2][1].finish_reason is FinishReason.ERROR
    assert ended[2][1].error == "logits are not finite"
    assert ended[1][0] == tokens_of(1, 10)[1:]
    assert ended[3][0] == tokens_of(3, 10)[1:]


def test_what_a_failing_sequence_wrote_in_that_step_is_not_shared() -> None:
    engine, runner = make_broken_engine()
    runner.failing_sequence = 1
    engine.add(make_request(1, 9))
    [output] = engine.step().outputs
    assert output.finish_reason is FinishReason.ERROR
    assert engine.stats.num_cached_blocks == 0


@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
def test_a_step_that_fails_can_be_repeated(where: str) -> None:
    engine, runner = make_broken_engine()
    for sequence_id in (1, 2):
        engine.add(make_request(sequence_id, 9))
    engine.step()
    engine.add(make_request(3, 9))
    before = engine.stats
    setattr(runner, where, True)
    for _ in range(2):
        with pytest.raises(OSError, match="the device is gone"):
            engine.step()
        engine.check_integrity()
    after = engine.stats
    assert (after.num_steps, after.generation_tokens) == (1, before.generation_tokens)
    setattr(runner, where, False)
    ended = run_to_end(engine)
    assert ended[1][0] == tokens_of(1, 10)[1:]
    assert ended[3][0] == tokens_of(3, 10)
    assert engine.stats.recomputed_tokens == 0


def test_after_a_step_that_failed_everything_can_be_let_go() -> None:
    engine, runner = make_broken_engine()
    for sequence_id in range(6):
        engine.add(make_request(sequence_id, 9))
    runner.fail_collect = True
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    for sequence_id in range(6):
        assert engine.abort(sequence_id)
    engine.check_integrity()
    assert engine.stats.num_used_blocks == 0


def test_a_runner_that_samples_too_little_is_caught_before_anything_is_committed() -> None:
    engine, runner = make_broken_engine()
    for sequence_id in (1, 2):
        engine.add(make_request(sequence_id))
    runner.drop_a_token = True
    with pytest.raises(RuntimeError, match=r"sampled \[1\] tokens instead of \[1, 1\]"):
        engine.step()
    runner.drop_a_token = False
    assert run_to_end(engine)[1][0] == tokens_of(1, 10)


def test_an_abort_frees_at_once_whether_running_or_waiting() -> None:
    engine = build_model_free_engine(max_num_seqs=1)
    for sequence_id in (1, 2):
        engine.add(make_request(sequence_id))
    engine.step()
    assert engine.abort(1)
    assert engine.stats.num_used_blocks == 0
    assert engine.abort(2)
    assert not engine.has_work
    assert not engine.abort(1)
    assert not engine.abort(99)
    assert engine.stats.num_processed == 2


def test_recomputed_tokens_are_those_that_a_preemption_lost() -> None:
    engine = build_model_free_engine(max_num_seqs=1, num_blocks=16, block_size=4)
    engine.add(make_request(1, 10, max_tokens=4, priority=5))
    engine.step()
    engine.step()
    engine.add(make_request(2, 3, max_tokens=2))
    ended = run_to_end(engine)
    timing = ended[1][1].timing
    assert timing is not None
    # 11 tokens were computed and two blocks of 4 stayed cached: 3 are computed again.
    assert (timing.preemptions, timing.recomputed_tokens) == (1, 3)
    assert timing.cached_tokens == engine.stats.cached_tokens == 0, "coming back is no cache hit"
    stats = engine.stats
    assert (stats.num_preemptions, stats.recomputed_tokens, stats.prompt_tokens) == (1, 3, 13)
    assert ended[1][0] == tokens_of(1, 4)[2:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 0}, "prompt_token_ids: is empty"),
        ({"prompt": 32}, "leave no room for another: the model length is 32"),
        ({"prompt": 30, "output_token_ids": [1, 2]}, "30 tokens and 2 of output leave no room"),
        ({"output_token_ids": [1] * 10}, "max_tokens: 10 is reached"),
        ({"prompt": [1, 257]}, "prompt_token_ids: 257 is outside the vocabulary of 257"),
        ({"prompt": [-1]}, "prompt_token_ids: -1 is outside the vocabulary"),
        ({"output_token_ids": [300]}, "output_token_ids: 300 is outside the vocabulary"),
        ({"sequence_id": 7}, "sequence_id: 7 is in the engine already"),
    ],
)
def test_what_can_never_run_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    engine = build_model_free_engine(max_model_len=32)
    engine.add(make_request(7))
    with pytest.raises(ValueError, match=message):
        engine.add(make_request(**{"sequence_id": 8, **fields}))
    assert engine.stats.num_waiting == 1
    run_to_end(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "--max-num-batched-tokens: 7"),
        ({"num_blocks": 0}, "--kv-cache-memory"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_option(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_model_free_engine(**options)


def test_the_model_length_is_what_model_cache_and_setting_allow() -> None:
    runner = ModelFreeRunner(10, 16, max_model_len=100)
    lengths = [
        LLMEngine(
            runner, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=length
        ).limits.max_model_len
        for length in (None, 64, 1000)
    ]
    assert lengths == [100, 64, 100]
    assert build_model_free_engine(num_blocks=4).limits.max_model_len == 64


def test_an_engine_that_becomes_idle_audits_itself() -> None:
    engine, runner = make_broken_engine()
    engine.add(make_request(1, max_tokens=2))
    engine.step()
    runner.lose_a_block = True
    with pytest.raises(RuntimeError, match="in none"):
        engine.step()


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(1, 20),
    block_size=st.integers(2, 4),
    max_num_seqs=st.integers(1, 5),
    spare_budget=st.integers(0, 12),
    prefill_chunk=st.integers(1, 9),
    speculative_tokens=st.sampled_from([0, 0, 1, 3, 7]),
    async_scheduling=st.booleans(),
)
def test_any_workload_ends_with_every_request_served_once(
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    spare_budget: int,
    prefill_chunk: int,
    speculative_tokens: int,
    async_scheduling: bool,
) -> None:
    """Random arrivals, aborts, stops, priorities and shared prefixes in pools far too small.

    Prompts often hold parts of what is to come, so that drafts of it are right and wrong.

    The runner checks every position of every sequence that samples; the audit runs each step.
    """
    chance = random.Random(seed)
    engine = build_model_free_engine(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_budget,
        prefill_chunk=prefill_chunk,
        speculative_tokens=speculative_tokens,
        async_scheduling=async_scheduling,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    longest = engine.limits.max_model_len
    prefixes = [[chance.randrange(2) for _ in range(longest)] for _ in range(2)]
    requests: dict[int, EngineRequest] = {}
    for sequence_id in range(chance.randint(1, 14)):
        common = chance.choice(prefixes)[: chance.randint(0, chance.choice([3, longest - 1]))]
        first = chance.randrange(10)
        coming = tokens_of(sequence_id, 30)[first : first + chance.choice([0, 5, 20])]
        if coming:
            coming[chance.randrange(len(coming))] = chance.choice(coming)
        prompt = ([*common, *coming] or [chance.randrange(256)])[: longest - 1]
        num_emitted = chance.choice([0, 0, chance.randint(0, longest - 1 - len(prompt))])
        requests[sequence_id] = make_request(
            sequence_id,
            prompt,
            max_tokens=num_emitted + chance.randint(1, longest),
            output_token_ids=tokens_of(sequence_id, num_emitted),
            end_token_ids=frozenset(chance.choice([b"", b"", b"e", b"aeiou"])),
            params=SamplingParams(min_tokens=chance.choice([0, 0, 3])),
            priority=chance.choice([0, 0, 0, -1, 1, 5]),
            order=(float(chance.randint(0, 5)), str(sequence_id)),
            cache_salt=chance.choice(["", "", "salt"]),
        )
    expected = {
        sequence_id: expected_tokens(request, longest) for sequence_id, request in requests.items()
    }
    to_come = list(requests)
    tokens: dict[int, list[int]] = {sequence_id: [] for sequence_id in requests}
    ended: set[int] = set()
    aborted: set[int] = set()
    num_steps = 0
    while to_come or engine.has_work:
        while to_come and (chance.random() < 0.5 or not engine.has_work):
            engine.add(requests[to_come.pop()])
        if chance.random() < 0.05:
            present = sorted(requests.keys() - ended - aborted - set(to_come))
            victim = chance.choice(present)
            assert engine.abort(victim)
            aborted.add(victim)
            engine.check_integrity()
        for output in engine.step().outputs:
            assert output.sequence_id not in ended | aborted
            tokens[output.sequence_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
                assert output.timing is not None
                if not output.timing.preemptions:
                    assert output.timing.recomputed_tokens == 0
                ended.add(output.sequence_id)
        engine.check_integrity()
        num_steps += 1
        assert num_steps < 5000, "the workload does not come to an end"
    assert ended | aborted == requests.keys()
    for sequence_id in ended:
        assert tokens[sequence_id] == expected[sequence_id]
    for sequence_id in aborted:
        emitted = tokens[sequence_id]
        assert emitted == expected[sequence_id][: len(emitted)]
    stats = engine.stats
    assert stats.num_used_blocks == 0
    assert stats.num_processed == len(requests)
    assert stats.generation_tokens == sum(map(len, tokens.values()))
    if not stats.num_preemptions:
        assert stats.recomputed_tokens == 0
