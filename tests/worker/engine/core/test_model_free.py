"""The model-free engine: a known function of seed and position, light, and a strict cache."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence
from tests.support.model_free import (
    ModelFreeRunner,
    build_model_free_engine,
    token_at,
    tokens_of,
)


def make_sequence(token_ids: list[int], sequence_id: int = 0, slot: int = 0) -> Sequence:
    request = EngineRequest(sequence_id, token_ids, SamplingParams(), seed=7, max_tokens=10)
    sequence = Sequence.of(request)
    sequence.slot = slot
    return sequence


def share_of(sequence: Sequence) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    return ScheduledSequence(sequence, start, sequence.num_tokens - start, samples=True)


def test_tokens_are_readable_and_a_function_of_seed_and_position_alone() -> None:
    tokens = tokens_of(3, 500)
    assert tokens == [token_at(3, position) for position in range(500)]
    assert set(tokens) == set(b"abcdefghijklmnopqrstuvwxyz ")
    assert tokens != tokens_of(4, 500)


def test_the_engine_emits_the_known_tokens_and_resumes_in_the_middle() -> None:
    engine = build_model_free_engine()
    prompt = list(b"prompt")
    done = tokens_of(11, 8)
    engine.add(EngineRequest(1, prompt, SamplingParams(), seed=11, max_tokens=20))
    engine.add(
        EngineRequest(2, prompt, SamplingParams(), seed=11, max_tokens=20, output_token_ids=done)
    )
    emitted: dict[int, list[int]] = {1: [], 2: []}
    while engine.has_work:
        for output in engine.step().outputs:
            emitted[output.sequence_id] += output.token_ids
    assert emitted == {1: tokens_of(11, 20), 2: tokens_of(11, 20)[8:]}


def test_logprobs_come_where_they_were_asked_for() -> None:
    engine = build_model_free_engine()
    for sequence_id, logprobs in enumerate((None, 0, 2)):
        params = SamplingParams(logprobs=logprobs)
        engine.add(EngineRequest(sequence_id, [65], params, seed=1, max_tokens=1))
    without, chosen, top = engine.step().outputs
    assert without.logprobs is None
    assert chosen.logprobs is not None
    assert (chosen.logprobs[0].token_id, chosen.logprobs[0].top) == (token_at(1, 0), None)
    assert top.logprobs is not None
    assert top.logprobs[0].top is not None


def test_it_runs_without_torch_and_starts_at_once() -> None:
    """A process of its own, since this one may have imported torch for other tests."""
    program = """
import sys
from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.llm_engine import LLMEngine
from promptq.worker.engine.core.model_free import ModelFreeRunner
runner = ModelFreeRunner(num_blocks=4, block_size=16, max_model_len=64)
engine = LLMEngine(runner, max_num_seqs=4, max_num_batched_tokens=16)
engine.add(EngineRequest(1, [65, 66], SamplingParams(), seed=1, max_tokens=5))
while engine.has_work:
    engine.step()
assert engine.stats.generation_tokens == 5
heavy = {"torch", "transformers", "numpy", "redis"} & set(sys.modules)
assert not heavy, heavy
"""
    started_at = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert time.monotonic() - started_at < 20


def test_a_step_takes_as_long_as_asked() -> None:
    engine = build_model_free_engine(step_seconds=0.02)
    engine.add(EngineRequest(1, [65], SamplingParams(), seed=1, max_tokens=3))
    while engine.has_work:
        assert engine.step().stats.step_seconds >= 0.02


def test_a_block_that_another_sequence_overwrote_is_noticed() -> None:
    runner = ModelFreeRunner(4, 4)
    victim, thief = make_sequence([1, 2, 3], 1), make_sequence([9, 9, 9], 2)
    victim.block_table, thief.block_table = [0], [0]
    runner.launch(Batch([share_of(victim)]))
    victim.num_computed_tokens = 3
    victim.token_ids.append(4)
    runner.launch(Batch([share_of(thief)]))
    with pytest.raises(RuntimeError, match="sequence 1 reads other data than its"):
        runner.launch(Batch([share_of(victim)]))


def test_a_shared_block_behind_another_beginning_is_noticed() -> None:
    """Equal tokens at equal positions are not enough: K and V depend on all tokens before."""
    runner = ModelFreeRunner(4, 2)
    writer, reader = make_sequence([1, 1, 5, 5], 1), make_sequence([2, 2, 5, 5, 6], 2)
    writer.block_table = [0, 1]
    runner.launch(Batch([share_of(writer)]))
    reader.block_table = [2, 1, 3]
    first = ScheduledSequence(reader, 0, 2, samples=False)
    runner.launch(Batch([first]))
    reader.num_computed_tokens = 4
    with pytest.raises(RuntimeError, match="sequence 2 reads other data"):
        runner.launch(Batch([share_of(reader)]))


def test_a_block_shared_in_the_very_step_that_writes_it_is_noticed() -> None:
    runner = ModelFreeRunner(4, 2)
    writer, reader = make_sequence([1, 2, 3], 1, slot=0), make_sequence([1, 2, 4], 2, slot=1)
    writer.block_table, reader.block_table = [0, 1], [0, 2]
    reader.num_computed_tokens = 2
    with pytest.raises(RuntimeError, match="nothing is cached before it"):
        runner.launch(Batch([share_of(writer), share_of(reader)]))


def test_two_sequences_in_one_slot_or_one_cell_are_noticed() -> None:
    runner = ModelFreeRunner(4, 2)
    one, two = make_sequence([1], 1, slot=0), make_sequence([2], 2, slot=0)
    one.block_table, two.block_table = [0], [0]
    with pytest.raises(RuntimeError, match="slots"):
        runner.launch(Batch([share_of(one), share_of(two)]))
    two.slot = 1
    with pytest.raises(RuntimeError, match="write cell 0"):
        runner.launch(Batch([share_of(one), share_of(two)]))
