"""Scheduling: who computes what in a step, who joins, who waits, who makes room."""

from __future__ import annotations

from random import Random

import pytest

from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Sequence, SequenceStatus
from tests.worker.engine.core.stepping import (
    add,
    commit,
    make_scheduler,
    make_sequence,
    step,
)


def test_a_prompt_that_fits_the_step_is_computed_at_once_and_then_decodes() -> None:
    scheduler, sequence = make_scheduler(), make_sequence(10)
    add(scheduler, sequence)
    [share] = scheduler.schedule().scheduled
    assert (share.start, share.num_tokens, share.samples) == (0, 10, True)
    assert step(scheduler) == [(sequence, 10)], "not committed, so the same work again"
    assert step(scheduler) == [(sequence, 1)]


def test_prefill_is_chunked_and_only_the_last_chunk_samples() -> None:
    scheduler, sequence = make_scheduler(prefill_chunk=4), make_sequence(10)
    add(scheduler, sequence)
    seen = []
    for _ in range(4):
        [share] = scheduler.schedule().scheduled
        seen.append((share.start, share.num_tokens, share.samples))
        step(scheduler)
    assert seen == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]


def test_one_budget_serves_decodes_first_then_prefills_then_who_waits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    decoding, prefilling, waiting = make_sequence(2), make_sequence(20), make_sequence(3)
    add(scheduler, decoding)
    step(scheduler)
    add(scheduler, prefilling, waiting)
    assert step(scheduler) == [(decoding, 1), (prefilling, 7)]
    assert step(scheduler) == [(decoding, 1), (prefilling, 7)]
    assert step(scheduler) == [(decoding, 1), (prefilling, 6), (waiting, 1)]
    assert step(scheduler) == [(decoding, 1), (prefilling, 1), (waiting, 2)]


def test_an_urgent_prefill_gets_its_share_before_a_less_urgent_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, prefill_chunk=6)
    calm, urgent = make_sequence(20), make_sequence(20, priority=-1)
    add(scheduler, calm)
    assert step(scheduler) == [(calm, 6)]
    add(scheduler, urgent)
    assert step(scheduler) == [(calm, 6), (urgent, 2)]
    assert step(scheduler) == [(urgent, 6), (calm, 2)]


def test_who_waits_is_admitted_in_queue_order_whatever_order_they_came_in() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    third, first, second = (make_sequence(4, score=score) for score in (3.0, 1.0, 2.0))
    add(scheduler, third, first, second)
    assert step(scheduler) == [(first, 4), (second, 4)]
    assert scheduler.waiting == [third]


def test_slots_have_one_owner_and_the_lowest_is_reused_first() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    first = [make_sequence(4) for _ in range(3)]
    add(scheduler, *first)
    step(scheduler)
    assert [sequence.slot for sequence in first] == [0, 1, 2]
    scheduler.remove(first[2])
    scheduler.remove(first[0])
    assert first[0].slot is None
    assert first[0].status is SequenceStatus.FINISHED
    later = [make_sequence(4) for _ in range(2)]
    add(scheduler, *later)
    step(scheduler)
    assert [sequence.slot for sequence in later] == [0, 2]


def test_those_behind_a_head_that_does_not_fit_wait_with_it() -> None:
    scheduler = make_scheduler(num_blocks=8)
    running, large, small = make_sequence(16), make_sequence(20), make_sequence(2)
    add(scheduler, running, large, small)
    assert step(scheduler) == [(running, 16)]
    scheduler.remove(running)
    assert step(scheduler) == [(large, 20), (small, 2)]


def test_an_admission_leaves_the_others_a_block_for_their_next_tokens() -> None:
    scheduler = make_scheduler(num_blocks=4)
    running, fits_exactly = make_sequence(8), make_sequence(8)
    add(scheduler, running, fits_exactly)
    assert step(scheduler) == [(running, 8)]
    assert step(scheduler) == [(running, 1)]
    assert scheduler.num_preemptions == 0


def test_alone_a_sequence_may_fill_the_whole_pool() -> None:
    scheduler, sequence = make_scheduler(num_blocks=4), make_sequence(16)
    add(scheduler, sequence)
    assert step(scheduler) == [(sequence, 16)]


def test_when_blocks_run_out_the_least_urgent_makes_room_and_keeps_its_place() -> None:
    scheduler = make_scheduler(num_blocks=5)
    urgent, calm = make_sequence(7), make_sequence(6, score=2.0)
    latecomer = make_sequence(1)
    add(scheduler, calm, urgent)
    assert step(scheduler) == [(calm, 6), (urgent, 7)]
    add(scheduler, latecomer)
    scheduled = [step(scheduler) for _ in range(3)]
    # Order decides among equal priorities: here `calm` came first and `urgent` has to go.
    assert scheduled[2] == [(calm, 1)]
    assert scheduler.waiting == [urgent, latecomer]
    assert (urgent.slot, urgent.block_table, urgent.status) == (None, [], SequenceStatus.WAITING)
    assert (urgent.num_tokens, urgent.num_computed_tokens) == (7 + 3, 0)
    assert (urgent.timing.preemptions, scheduler.num_preemptions) == (1, 1)


def test_the_least_urgent_preempts_itself_when_it_is_the_one_without_a_block() -> None:
    scheduler = make_scheduler(num_blocks=4)
    urgent, calm = make_sequence(5, priority=-1), make_sequence(3)
    add(scheduler, urgent, calm)
    step(scheduler)
    step(scheduler)
    filler = make_sequence(1, priority=-2)
    add(scheduler, filler)
    seen = [step(scheduler) for _ in range(4)]
    assert calm.timing.preemptions == 1
    assert (urgent.timing.preemptions, filler.timing.preemptions) == (0, 0)
    assert all(share[0] is not calm for share in seen[-1])


def test_a_preempted_sequence_comes_back_to_its_cached_blocks() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    calm, urgent = make_sequence(10), make_sequence(4, priority=-1)
    add(scheduler, calm)
    step(scheduler)
    add(scheduler, urgent)
    assert step(scheduler) == [(urgent, 4)]
    scheduler.remove(urgent)
    assert step(scheduler) == [(calm, 3)], "two blocks were cached, of 11 tokens"


def test_a_more_urgent_priority_evicts_the_least_urgent_for_its_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    low, lowest = make_sequence(4, priority=1), make_sequence(4, priority=2)
    urgent = make_sequence(4, priority=0)
    add(scheduler, low, lowest)
    step(scheduler)
    add(scheduler, urgent)
    assert step(scheduler) == [(low, 1), (urgent, 4)]
    assert scheduler.waiting == [lowest]


def test_equal_priority_evicts_nobody_however_early_its_score() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, earlier = make_sequence(4), make_sequence(4, score=-1.0)
    add(scheduler, running)
    step(scheduler)
    add(scheduler, earlier)
    assert step(scheduler) == [(running, 1)]
    assert scheduler.num_preemptions == 0


def test_nobody_is_evicted_for_one_who_would_not_fit_even_then() -> None:
    scheduler = make_scheduler(num_blocks=10)
    equal, low = make_sequence(20, priority=0), make_sequence(8, priority=5)
    urgent = make_sequence(24, priority=0)
    add(scheduler, equal, low)
    step(scheduler)
    add(scheduler, urgent)
    assert step(scheduler) == [(equal, 1), (low, 1)]
    assert scheduler.num_preemptions == 0


def test_only_as_many_are_evicted_as_are_needed() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=8)
    low = [make_sequence(6, priority=priority) for priority in (1, 2, 3, 4)]
    urgent = make_sequence(17, priority=0)
    add(scheduler, *low)
    step(scheduler)
    add(scheduler, urgent)
    step(scheduler)
    assert urgent.status is SequenceStatus.RUNNING
    assert [sequence.timing.preemptions for sequence in low] == [0, 0, 1, 1]


def test_an_urgent_one_may_have_the_whole_pool_for_itself() -> None:
    scheduler = make_scheduler(num_blocks=4)
    low, urgent = make_sequence(8, priority=1), make_sequence(15)
    add(scheduler, low)
    step(scheduler)
    add(scheduler, urgent)
    assert step(scheduler) == [(urgent, 15)]


def test_an_urgent_one_evicts_even_from_behind_a_head_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=10)
    running, head = make_sequence(24, priority=3), make_sequence(24, priority=3)
    urgent = make_sequence(16, priority=0)
    add(scheduler, running, head)
    step(scheduler)
    add(scheduler, urgent)
    assert step(scheduler) == [(urgent, 16)]
    assert scheduler.waiting == [running, head]


def test_one_as_urgent_as_those_who_run_waits_behind_a_head_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=10)
    running, head, equal = make_sequence(24), make_sequence(24, priority=3), make_sequence(2)
    add(scheduler, running, head, equal)
    assert step(scheduler) == [(running, 24)]
    assert step(scheduler) == [(running, 1)]


def test_what_a_victim_was_given_of_the_step_goes_to_who_evicts_it() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    low = [make_sequence(1, priority=1), make_sequence(1, priority=1)]
    urgent = make_sequence(1)
    add(scheduler, *low)
    step(scheduler)
    add(scheduler, urgent)
    assert step(scheduler) == [(low[0], 1), (urgent, 1)]


def test_a_shared_prefix_is_computed_once_and_waited_for() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    prefix = list(range(24))
    first = make_sequence(0, tokens=[*prefix, 100])
    second = make_sequence(0, tokens=[*prefix, 200, 201])
    other = make_sequence(3)
    add(scheduler, first, second, other)
    assert step(scheduler) == [(first, 8), (other, 3)], "others behind do not wait"
    assert step(scheduler) == [(other, 1), (first, 8)]
    assert step(scheduler) == [(other, 1), (first, 8)]
    assert step(scheduler) == [(first, 1), (other, 1), (second, 2)]
    assert second.timing.cached_tokens == 24


def test_who_waits_for_a_prefix_keeps_its_slot_from_those_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=2, prefill_chunk=8)
    first, second = (make_sequence(0, tokens=[*range(16), last]) for last in (100, 200))
    other = make_sequence(3)
    add(scheduler, first, second, other)
    assert step(scheduler) == [(first, 8)]
    assert step(scheduler) == [(first, 8)]
    assert step(scheduler) == [(first, 1), (second, 1)]


def test_nobody_waits_for_the_prefix_of_one_who_is_gone() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    first, second = (make_sequence(0, tokens=[*range(24), last]) for last in (100, 200))
    add(scheduler, first, second)
    assert step(scheduler) == [(first, 8)]
    scheduler.remove(first)
    assert step(scheduler) == [(second, 8)]
    assert second.timing.cached_tokens == 8


def test_nobody_waits_for_a_prefix_that_parts_before_the_block_in_work() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    first, second = make_sequence(0, tokens=[*range(24)]), make_sequence(0, tokens=[9, *range(23)])
    add(scheduler, first, second)
    assert step(scheduler) == [(first, 8), (second, 8)]


def test_nobody_waits_for_a_block_that_it_has_to_compute_anyway() -> None:
    scheduler = make_scheduler(prefill_chunk=4)
    first, second = make_sequence(0, tokens=[*range(12)]), make_sequence(0, tokens=[*range(8)])
    add(scheduler, first, second)
    assert step(scheduler) == [(first, 4)]
    assert step(scheduler) == [(first, 4), (second, 4)]


def test_removing_one_who_waits_leaves_no_trace() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, gone, next_one = make_sequence(4), make_sequence(4), make_sequence(4)
    add(scheduler, running, gone, next_one)
    step(scheduler)
    scheduler.remove(gone)
    scheduler.remove(running)
    assert step(scheduler) == [(next_one, 4)]
    scheduler.check_integrity()


def random_run(seed: int) -> list[list[tuple[int, int]]]:
    """The steps of a scheduler that is short of memory, for sequences that often share prefixes."""
    random = Random(seed)
    scheduler = make_scheduler(num_blocks=random.randint(12, 20), prefill_chunk=16)
    number: dict[Sequence, int] = {}
    steps = []
    for _ in range(120):
        if random.random() < 0.3 and len(scheduler.waiting) < 5:
            shared = [random.randint(0, 1)] * random.choice([0, 4, 12])
            tokens = shared + [100 + len(number)] * random.randint(1, 20)
            sequence = make_sequence(0, tokens=tokens, priority=random.choice([0, 0, 0, 1]))
            number[sequence] = len(number)
            add(scheduler, sequence)
        if scheduler.running and random.random() < 0.1:
            scheduler.remove(random.choice(scheduler.running))
        if scheduler.running or scheduler.waiting:
            steps.append([(number[sequence], count) for sequence, count in step(scheduler)])
        for sequence in [it for it in scheduler.running if it.num_tokens > 40]:
            scheduler.remove(sequence)
    return steps


def test_searches_for_prefixes_that_are_left_out_change_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for further in range(5):
        steps = random_run(seed + further)
        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "_still_lacks_room", lambda *_: False)
            assert random_run(seed + further) == steps


def test_the_prefix_of_one_who_waits_for_memory_is_seldom_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(num_blocks=50)
    add(scheduler, make_sequence(60), make_sequence(60))
    step(scheduler)
    add(scheduler, make_sequence(180))
    searches = 0
    find_prefix = BlockManager.find_prefix

    def counting(self: BlockManager, sequence: Sequence) -> list[int]:
        nonlocal searches
        searches += 1
        return find_prefix(self, sequence)

    monkeypatch.setattr(BlockManager, "find_prefix", counting)
    for _ in range(20):
        batch = scheduler.schedule()
        assert scheduler.follow(batch) is not None
        commit(scheduler, batch)
    assert len(scheduler.waiting) == 1
    assert searches <= 2
