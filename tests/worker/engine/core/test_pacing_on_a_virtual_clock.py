"""The real scheduler and pacing, with steps that take what a formula says: no machine is timed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from promptq.worker.engine.core.block_manager import BlockManager
from promptq.worker.engine.core.prefill_pacing import STRETCH, Pacing
from promptq.worker.engine.core.scheduler import Scheduler
from promptq.worker.engine.core.sequence import Sequence
from tests.worker.engine.core.stepping import commit, make_sequence

DECODE = 0.0065
"""Seconds of a step of 64 decodes that is replayed as a graph."""
HOST = 0.015
"""Seconds for which the host launches the kernels of any other step."""
SEED = 11


def graphed(num_prompt_tokens: int) -> float:
    """A device whose decodes are replayed, while other steps wait for the host."""
    if num_prompt_tokens == 0:
        return DECODE
    return max(HOST, DECODE + 0.00004 * num_prompt_tokens)


def on_a_cpu(num_prompt_tokens: int) -> float:
    """Each token costs alike."""
    return 0.020 + 0.0004 * num_prompt_tokens


@dataclass
class Run:
    first_token_seconds: list[float] = field(default_factory=list)
    """Of each prompt, from its arrival."""
    step_seconds: list[float] = field(default_factory=list)


def run(step_seconds: Callable[[int], float], prompts: list[tuple[float, int]]) -> Run:
    """Serve prompts, given as the time of arrival and the length, beside 64 decodes."""
    scheduler = Scheduler(256, 4096, 4096, BlockManager(40_000, 16))
    pacing, now, result = Pacing(), 0.0, Run()
    for _ in range(64):
        scheduler.add(make_sequence(20))
    coming, arrived = sorted(prompts), dict[Sequence, float]()
    is_first = True
    while coming or arrived:
        while coming and coming[0][0] <= now and not is_first:
            at, length = coming.pop(0)
            sequence = make_sequence(length)
            arrived[sequence] = at
            scheduler.add(sequence)
        batch = scheduler.schedule(pacing.chunk, pacing.prompt_tokens)
        seconds = step_seconds(sum(it.num_tokens for it in batch.scheduled if it.num_tokens > 1))
        if not is_first:  # the decodes' own prompts are not what is looked at
            now += seconds
            pacing.note(batch, seconds)
            result.step_seconds.append(seconds)
        is_first = False
        commit(scheduler, batch)
        for share in batch.scheduled:
            if share.samples and share.sequence in arrived:
                result.first_token_seconds.append(now - arrived.pop(share.sequence))
                scheduler.remove(share.sequence)
    return result


def test_where_only_decodes_are_replayed_a_long_prompt_comes_in_large_chunks() -> None:
    found = run(graphed, [(0.5, 4000)])
    assert found.first_token_seconds[0] < 0.35  # in one step, 0.17
    assert max(found.step_seconds) < 2 * HOST


def test_a_start_without_a_step_of_decodes_alone_learns_too() -> None:
    assert run(graphed, [(0.0, 4000)]).first_token_seconds[0] < 0.35


def test_a_burst_at_a_cold_start_is_not_computed_in_small_steps() -> None:
    """The first step has only prompts. Then decodes run beside prompts until the burst is over, and
    still a step of decodes alone tells what those may take."""

    def seconds(num_prompt_tokens: int) -> float:
        return 0.010 + 0.000024 * num_prompt_tokens

    scheduler = Scheduler(256, 8192, 8192, BlockManager(40_000, 16))
    pacing, took, num_steps = Pacing(), 0.0, 0
    for _ in range(128):
        scheduler.add(make_sequence(512))
    while any(it.num_computed_tokens < 512 for it in (*scheduler.waiting, *scheduler.running)):
        batch = scheduler.schedule(pacing.chunk, pacing.prompt_tokens)
        step = seconds(sum(it.num_tokens for it in batch.scheduled if it.num_tokens > 1))
        pacing.note(batch, step)
        commit(scheduler, batch)
        took, num_steps = took + step, num_steps + 1
    assert num_steps < 60  # 256 tokens in each would make 224
    assert took < 1.5 * 128 * 512 * 0.000024


def test_prompts_that_keep_coming_do_not_pile_up() -> None:
    rng, at, prompts = random.Random(SEED), 0.0, []
    for _ in range(60):
        at += rng.expovariate(3)
        prompts.append((at, 1500))
    assert median(run(graphed, prompts).first_token_seconds) < 0.2


def test_where_tokens_cost_alike_decodes_keep_their_pace() -> None:
    found = run(on_a_cpu, [(1.0, 4000)])
    assert max(found.step_seconds) <= STRETCH * on_a_cpu(0) * 1.001
    ideal = 4000 * STRETCH / (STRETCH - 1) * 0.0004
    assert found.first_token_seconds[0] < 1.05 * ideal
