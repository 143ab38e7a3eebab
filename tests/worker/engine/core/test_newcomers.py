"""A tenant of which nothing runs gets a place from those that have more than their share."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Sequence, SequenceStatus
from tests.worker.engine.core.stepping import add, make_scheduler, make_sequence, step


def flooded(
    num: int = 4, length: int = 4, tenant: str = "many", weight: float = 1.0, **sizes: int
) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler whose slots one tenant holds, and that has one more of it waiting."""
    scheduler = make_scheduler(max_num_seqs=num, **sizes)
    many = [make_sequence(length, tenant=tenant, weight=weight) for _ in range(num + 1)]
    add(scheduler, *many)
    step(scheduler)
    assert scheduler.running == many[:num]
    return scheduler, many


def test_it_gets_the_slot_of_the_last_one_and_that_one_comes_back_first() -> None:
    scheduler, many = flooded()
    few = make_sequence(4, tenant="few")
    add(scheduler, few)
    assert step(scheduler) == [(many[0], 1), (many[1], 1), (many[2], 1), (few, 4)]
    assert scheduler.waiting == [many[3], many[4]]
    assert [it.timing.preemptions for it in many] == [0, 0, 0, 1, 0]
    scheduler.remove(few)
    step(scheduler)
    assert scheduler.running == many[:4]
    assert scheduler.num_preemptions == 1


def test_the_second_of_a_tenant_preempts_nobody() -> None:
    scheduler, _ = flooded()
    few = [make_sequence(4, tenant="few") for _ in range(2)]
    add(scheduler, *few)
    for _ in range(3):
        step(scheduler)
    assert [it.status for it in few] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    assert scheduler.num_preemptions == 1


def test_each_further_tenant_gets_in_until_each_has_one() -> None:
    scheduler, many = flooded(num=4)
    others = [make_sequence(4, tenant=f"t{n}") for n in range(5)]
    add(scheduler, *others)
    for _ in range(5):
        step(scheduler)
    assert scheduler.running == [many[0], *others[:3]]
    assert scheduler.num_preemptions == 3


def test_it_takes_from_the_tenant_that_has_most() -> None:
    scheduler = make_scheduler(max_num_seqs=5)
    names = ["two", "three", "three", "three", "two"]
    running = [make_sequence(4, tenant=name) for name in names]
    add(scheduler, *running)
    step(scheduler)
    add(scheduler, make_sequence(4, tenant="few"))
    step(scheduler)
    assert [it.timing.preemptions for it in running] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(("weight", "gets_in"), [(0.5, True), (3.0, True), (4.0, False)])
def test_a_heavier_tenant_may_have_more(weight: float, gets_in: bool) -> None:
    """Three are left to it. As much by weight as one of a tenant of weight 1 are three at 3."""
    scheduler, _ = flooded(num=4, weight=weight)
    few = make_sequence(4, tenant="few")
    add(scheduler, few)
    step(scheduler)
    assert (few.status is SequenceStatus.RUNNING) == gets_in


def test_no_more_urgent_one_makes_room_and_none_is_passed() -> None:
    scheduler, many = flooded()
    few = make_sequence(4, tenant="few", priority=1)
    add(scheduler, few)
    step(scheduler)
    assert scheduler.running == many[:4]
    scheduler.remove(many[0])
    step(scheduler)
    assert scheduler.running == many[1:5], "that one is more urgent"


def test_alone_a_tenant_is_scheduled_as_if_there_were_no_others() -> None:
    scheduler, many = flooded(tenant="")
    add(scheduler, make_sequence(4, score=-1.0))
    step(scheduler)
    assert (scheduler.running, scheduler.num_preemptions) == (many[:4], 0)


def test_it_gets_kv_memory_from_behind_a_head_that_waits_for_some() -> None:
    """From the tenant that has most memory, although another has more slots."""
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=20)
    large = [make_sequence(26, tenant="large") for _ in range(2)]
    small = [make_sequence(2, tenant="small") for _ in range(4)]
    head = make_sequence(24, tenant="small")
    add(scheduler, *large, *small, head)
    step(scheduler)
    step(scheduler)
    assert scheduler.running == [*large, *small]
    few = make_sequence(8, tenant="few")
    add(scheduler, few)
    step(scheduler)
    assert few.status is SequenceStatus.RUNNING
    assert [it.timing.preemptions for it in (*large, *small)] == [0, 1, 0, 0, 0, 0]


def test_more_than_its_share_of_memory_has_to_wait() -> None:
    scheduler, many = flooded(num=4, length=20, num_blocks=24)
    few = make_sequence(50, tenant="few")
    add(scheduler, few)
    step(scheduler)
    assert (scheduler.running, scheduler.num_preemptions) == (many[:4], 0)


def test_where_memory_ends_the_newcomer_stays_and_does_not_come_and_go() -> None:
    scheduler, many = flooded(num=4, length=12, num_blocks=16)
    few = make_sequence(4, tenant="few")
    add(scheduler, few)
    for _ in range(10):
        step(scheduler)
        assert few.status is SequenceStatus.RUNNING
    assert few.num_tokens == 14
    assert many[0].num_tokens == 12 + 11, "nor does the first one of all"
    assert scheduler.num_preemptions == 2


def test_its_prompt_is_computed_beside_the_first_prompt_of_another() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, prefill_chunk=8, num_blocks=99)
    many = [make_sequence(60, tenant="many") for _ in range(2)]
    few = make_sequence(12, tenant="few")
    add(scheduler, *many)
    assert step(scheduler) == [(many[0], 8), (many[1], 8)]
    add(scheduler, few)
    assert step(scheduler) == [(many[0], 8), (many[1], 8)]
    assert few.status is SequenceStatus.RUNNING
    assert step(scheduler) == [(many[0], 8), (few, 8)]
    batch = scheduler.schedule()
    assert [(it.sequence, it.num_tokens) for it in batch.scheduled[:2]] == [(many[0], 8), (few, 4)]
    ahead = scheduler.follow(batch)
    assert ahead is not None
    assert [it.sequence for it in ahead.scheduled] == [few, many[0], many[1]]


def test_the_step_ahead_leaves_room_for_a_newcomer() -> None:
    scheduler, _ = flooded()
    batch = scheduler.schedule()
    assert scheduler.follow(batch) is not None
    add(scheduler, make_sequence(4, tenant="few"))
    assert scheduler.follow(batch) is None


@pytest.mark.parametrize("num_blocks", [(12, 30), (500, 500)], ids=["short", "ample"])
def test_at_random_all_come_to_their_end_and_no_tenant_waits_beside_one_with_more(
    num_blocks: tuple[int, int], seed: int
) -> None:
    random = Random(seed)
    for _ in range(8):
        scheduler = make_scheduler(
            max_num_seqs=random.randint(1, 6),
            num_blocks=random.randint(*num_blocks),
            max_num_batched_tokens=random.choice([16, 64]),
        )
        assert_all_end(scheduler, random, is_ample=num_blocks[0] == 500)


def assert_all_end(scheduler: Scheduler, random: Random, *, is_ample: bool) -> None:
    weights = {name: random.choice([1.0, 1.0, 2.0, 5.0]) for name in "abcd"}
    lengths = {}
    for _ in range(40):
        tenant, priority = random.choice("aaaaabcd"), random.choice([0, 0, 0, 1])
        sequence = make_sequence(
            random.randint(1, 20), priority=priority, tenant=tenant, weight=weights[tenant]
        )
        lengths[sequence] = sequence.num_tokens + random.randint(1, 25)
    coming, num_steps, num_tokens = list(lengths), 0, sum(lengths.values())
    while coming or scheduler.waiting or scheduler.running:
        if coming and random.random() < 0.3:
            add(scheduler, coming.pop())
        if not (scheduler.waiting or scheduler.running):
            continue
        num_steps, was_empty = num_steps + 1, not scheduler.running
        urgent = min((it.request.priority for it in scheduler.waiting), default=0)
        assert num_steps < 5 * num_tokens, "it does not come to an end"
        assert step(scheduler), "a step without work"
        if is_ample and not was_empty:
            assert_shares(scheduler, weights, urgent)
        for sequence in [it for it in scheduler.running if it.num_tokens >= lengths[it]]:
            scheduler.remove(sequence)
    print(f"{num_steps} steps for {num_tokens} tokens, {scheduler.num_preemptions} preemptions")


def assert_shares(scheduler: Scheduler, weights: dict[str, float], urgent: int) -> None:
    """No tenant waits as long as one that makes room for it would still have as much as it.

    `urgent` is the priority of the most urgent ones that waited before the step.
    """
    running = Counter(it.request.tenant for it in scheduler.running)
    for sequence in scheduler.waiting:
        tenant, priority = sequence.request.tenant, sequence.request.priority
        if tenant in running or priority != urgent:
            continue
        for other in scheduler.running:
            name = other.request.tenant
            is_beyond = (running[name] - 1) / weights[name] >= 1 / weights[tenant]
            assert not (is_beyond and other.request.priority >= priority), (running, tenant)
