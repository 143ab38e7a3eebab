"""Long prompts beside decodes: chunks by what a step costs, and short prompts as they are."""

from __future__ import annotations

from promptq.shared.protocol.request import SamplingParams
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.prefill_pacing import (
    LONG_PROMPT,
    MIN_CHUNK,
    MIN_PROMPT_TOKENS,
    PROMPTS_STRETCH,
    STRETCH,
    Pacing,
)
from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Batch, ScheduledSequence, Sequence

PARAMS = SamplingParams.model_validate({})


def sequence(sequence_id: int, num_tokens: int, *, num_computed: int = 0) -> Sequence:
    request = EngineRequest(
        sequence_id,
        [sequence_id] * num_tokens,
        PARAMS,
        seed=0,
        max_tokens=9,
        order=(sequence_id, ""),
    )
    made = Sequence.of(request)
    made.num_computed_tokens = num_computed
    return made


def batch(*num_tokens: int) -> Batch:
    return Batch([ScheduledSequence(sequence(1, 9), 0, count, True) for count in num_tokens])


def test_a_chunk_stretches_a_step_as_far_as_allowed() -> None:
    """Decodes of 10 ms and prompt tokens of 0.1 ms leave (STRETCH - 1) * 10 ms for a chunk."""
    pacing = Pacing()
    assert pacing.chunk == MIN_CHUNK
    for _ in range(50):
        pacing.note(batch(1, 1, 1), 0.010)
        pacing.note(batch(1, 1, 100), 0.020)
    assert abs(pacing.chunk - (STRETCH - 1) * 100) <= 1


def test_accepted_drafts_that_are_computed_again_are_no_prompt() -> None:
    """Recurrent layers do so. The sequence has 9 tokens of a prompt."""
    pacing = Pacing()
    for _ in range(50):
        pacing.note(batch(1), 0.010)
        pacing.note(batch(1, 1, 100), 0.020)
    chunk, again = pacing.chunk, sequence(1, 9, num_computed=9)
    again.token_ids += [1] * 5
    for _ in range(50):
        pacing.note(Batch([ScheduledSequence(again, 9, 5, True)]), 0.010)
    assert pacing.chunk == chunk


def test_chunks_follow_what_steps_cost_now() -> None:
    pacing = Pacing()
    for _ in range(50):
        pacing.note(batch(1), 0.010)
        pacing.note(batch(200), 0.004)
    early = pacing.chunk
    for _ in range(50):
        pacing.note(batch(200), 0.016)  # as a context grows, its tokens cost more
    assert MIN_CHUNK < pacing.chunk < early / 3


def test_steps_without_a_cost_allow_no_chunk_without_bound() -> None:
    pacing = Pacing()
    for _ in range(50):
        pacing.note(batch(1), 0.010)
        pacing.note(batch(1, 100), 0.010)
    assert pacing.chunk <= 4 * 100


def test_only_a_long_prompt_beside_decodes_is_paced() -> None:
    def scheduled(*sequences: Sequence) -> list[int]:
        scheduler = Scheduler(8, 4000, 4000, BlockManager(400, 16))
        for one in sequences:
            scheduler.add(one)
        first = scheduler.schedule(40)
        for share in first.scheduled:
            share.sequence.num_computed_tokens += share.num_tokens
            if share.samples:
                share.sequence.token_ids.append(5)
        scheduler.add(sequence(8, LONG_PROMPT + 100))
        scheduler.add(sequence(9, LONG_PROMPT))
        return sorted(share.num_tokens for share in scheduler.schedule(40).scheduled)

    assert scheduled() == [LONG_PROMPT, LONG_PROMPT + 100]
    assert scheduled(sequence(1, 20)) == [1, 40, LONG_PROMPT]


def test_of_prompts_that_come_at_once_the_first_do_not_wait_for_the_last() -> None:
    """Beside decodes they share what a step has for prompts, in order; alone they take it all."""

    def scheduled(*sequences: Sequence) -> dict[int, int]:
        scheduler = Scheduler(8, 4000, 4000, BlockManager(400, 16))
        for one in sequences:
            scheduler.add(one)
        for share in scheduler.schedule().scheduled:
            share.sequence.num_computed_tokens += share.num_tokens
            share.sequence.token_ids.append(5)
        for sequence_id in (7, 8, 9):
            scheduler.add(sequence(sequence_id, 100))
        batch = scheduler.schedule(None, 150)
        return {share.sequence.sequence_id: share.num_tokens for share in batch.scheduled}

    assert scheduled() == {7: 100, 8: 100, 9: 100}
    assert scheduled(sequence(1, 20)) == {1: 1, 7: 100, 8: 50}


def test_prompts_get_more_where_a_token_costs_little() -> None:
    pacing = Pacing()
    assert pacing.prompt_tokens == MIN_PROMPT_TOKENS
    for _ in range(50):
        pacing.note(batch(1, 1), 0.010)
        pacing.note(batch(1, 1, 1000), 0.030)
    assert abs(pacing.prompt_tokens - (PROMPTS_STRETCH - 1) * 500) <= 5
